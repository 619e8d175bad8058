"""Read and trust the evidence: checks, controls, paired intervals, the report."""

# %% [markdown]
# # Read the evidence
#
# A smaller model comes with claims: it is as accurate, it answers alike, it is faster. Evidence is what was measured
# for each, so that a reader can judge.

# %%
import os

import attnrx as rx
from attnrx_lab.checks import Robustness

MODEL = os.environ.get("MODEL", "")  # yours: timm:vit_tiny_patch16_224, hf:ID, a folder saved by attnrx
DATA = os.environ.get("DATA", "")  # yours: a folder of images, parquet, WebDataset shards, or a known name

# %%
if MODEL:
    model = rx.load(MODEL)
    _, size, _ = rx.models.family_of(model).input_shape(model)
    splits = rx.adapt_preprocessing(rx.load_data(DATA, image_size=size), model)
else:
    from stand_in import model, splits  # a small ViT for handwritten digits, trained in seconds

diagnosis = rx.diagnose(model, splits.train.take(96))
prescription = rx.prescribe(diagnosis, "qk=uniform_rank:0.25,metric=mix")
masked = rx.realize(model, prescription, by="mask")
slim = rx.realize(model, prescription)

# %% [markdown]
# ## Checks
#
# A check is a measurement with knobs. A knob that is a limit makes its finding a *claim*, which holds, fails, or
# is undecided on so few images; without a limit a quantity is only reported. Set the limits before you measure.

# %%
checks = [
    rx.checks.Accuracy(most_drop=5.0),  # points of top-1 that may be lost
    rx.checks.Fidelity(most_discrepancy=0.5),  # of the logits, relative (Eq. 46)
    rx.checks.Calibration(),
    rx.checks.Costs(),
    Robustness(severities=(3,), corruptions=("gaussian_noise",)),
]
evidence = rx.verify(slim, model, splits.test, checks, masked=masked, prescription=prescription, diagnosis=diagnosis)
for finding in evidence.findings:
    if finding.limit is not None:
        print(f"{finding.claim}: {finding.value:.3g} {finding.unit}, limit {finding.limit:g}, n = {finding.n}")

# %% [markdown]
# ## Intervals are paired
#
# Both models answer the same images, so what matters are the images where only one of them is right. The interval of
# the *change* is therefore far narrower than those of the two accuracies suggest. Read it so: if it contains zero,
# nothing was shown to be lost, and nothing to be gained; its lower end is what may have been lost.

# %%
before, after, change = evidence.of("accuracy")
for finding in (before, after, change):
    print(f"{finding.claim}: {finding.value:.1f} {finding.unit} [{finding.low:.1f}, {finding.high:.1f}]")

# %% [markdown]
# ## Accuracy is not enough
#
# A model can keep its accuracy and answer other images right. Discrepancy, agreement and divergence compare the answers
# themselves, between all pairs of reference, mask and candidate: reference against mask is what the *choice* costs,
# mask against candidate what the *realization* adds.

# %%
for finding in evidence.of("fidelity"):
    print(f"{finding.claim}: {finding.value:.4g} {finding.unit}")

# %% [markdown]
# ## Controls
#
# Would any other choice of the same size have done as well? Controls keep as many directions in every head, but choose
# them at random, by the largest strengths, or evenly. What is reported is how much *farther* each control is from the
# original than the rule's choice, with a paired interval: above zero, the rule's choice carries something.

# %%
prescriptions = rx.control_prescriptions(diagnosis, prescription, kinds=("random", "largest"), draws=3)
controls = rx.checks.Controls(prescriptions, lambda found: rx.realize(model, found))
for finding in rx.verify(slim, model, splits.test, [controls], prescription=prescription).findings:
    print(f"{finding.claim}: {finding.value:.4g} {finding.unit} [{finding.low:.3g}, {finding.high:.3g}]")

# %% [markdown]
# ## What to distrust
#
# - A change without an interval, or on images that were used to decide. Diagnose and calibrate on training images,
# verify on test images.
# - One seed. Findings carry theirs; `rx.checks.aggregate` puts the evidence of several seeds together, with intervals
# over the seeds.
# - Latency without conditions. The check times both models in turns, so a busy machine slows both, and says on what
# hardware, at what batch, on how many threads.
#
# ## The report
#
# One HTML file with everything, which needs no network. The JSON beside it holds every finding with value, limit,
# interval, n and seed, for a review or another program.

# %%
evidence.save("evidence.json")
content = rx.reports.ReportContent(
    "What a quarter of the directions costs", evidence=evidence, prescription=prescription, diagnosis=diagnosis
)
page = rx.write_report("report.html", content)
print(f"{page}: {evidence.summary}")

# %% [markdown]
# ## The same on the command line
#
# The exit code of `attnrx verify` is 1 where a claim fails, so a script or CI can ask.
#
# ```bash
# attnrx verify slim --reference timm:vit_tiny_patch16_224 --data path/to/images --most-drop 1 --out evidence.json
# attnrx verify slim --reference timm:vit_tiny_patch16_224 --data path/to/images \
#     --diagnosis diagnosis.json --controls --out controls.json
# attnrx report --evidence evidence.json --out report.html
# attnrx diff evidence.json controls.json
# ```
