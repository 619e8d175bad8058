"""Explains how to read evidence: checks, controls, paired intervals and the report."""

# %% [markdown]
# # Read the evidence
#
# Whoever offers a smaller model claims that its accuracy or its predictions are the same, or that it is faster.
# Evidence contains a measurement for each claim. This page explains how to read the measurements.

# %%
import os

import attnrx as rx
from attnrx_lab.checks import Controls, Robustness
from attnrx_lab.rules import control_prescriptions

MODEL = os.environ.get("MODEL", "")  # yours: timm:vit_tiny_patch16_224, hf:ID, a folder saved by attnrx
DATA = os.environ.get("DATA", "")  # yours: a folder of images, parquet, or a known name

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
# A *check* measures one or more quantities, and each result is called a *finding*. If you set a limit, the finding is a
# *claim*, which holds, fails, or is undecided because there are too few images. Without a limit, the finding only
# reports a quantity. Set the limits before you measure.

# %%
checks = [
    rx.checks.Accuracy(most_drop=5.0),  # how many points of top-1 accuracy the model may lose
    rx.checks.Fidelity(most_discrepancy=0.5),  # the largest relative difference of the logits (Eq. 46)
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
# Both models classify the same images, and most answers are the same. Only images where exactly one model is right
# affect the change of accuracy. So the *change* has a much narrower interval than either accuracy. If its interval
# contains zero, the images show neither a loss nor a gain. The lower end of the interval bounds the loss.

# %%
before, after, change = evidence.of("accuracy")
for finding in (before, after, change):
    print(f"{finding.claim}: {finding.value:.1f} {finding.unit} [{finding.low:.1f}, {finding.high:.1f}]")

# %% [markdown]
# A few images have much larger divergences than all others (heavy tails). With 50 images, the percentile intervals of a
# bootstrap therefore contain the mean in only 83 to 92 % of the cases. attnrx uses studentized intervals and widens
# them for few images. They contain the mean in 94 % of the cases or more (`python benchmarks/coverage.py`).
#
# ## Accuracy is not enough
#
# A smaller model can have the same accuracy as the original, but make its mistakes on different images. So the check
# `Fidelity` compares outputs directly, by their discrepancy, agreement and divergence. It compares the original
# (reference), the mask and the smaller model (candidate) in pairs. The difference between reference and mask is the
# cost of the *selection*. The difference between mask and candidate is the cost of the *realization*.

# %%
for finding in evidence.of("fidelity"):
    print(f"{finding.claim}: {finding.value:.4g} {finding.unit}")

# %% [markdown]
# ## Controls
#
# Would a simpler selection be just as good? Controls keep the same number of directions in every head as your
# prescription, but select them at random, by the largest strengths, or evenly. The findings tell you how much *farther*
# each control is from the original than your prescription, with a paired interval. If the interval is above zero, your
# prescription is better than the control.

# %%
prescriptions = control_prescriptions(diagnosis, prescription, kinds=("random", "largest"), draws=3)
controls = Controls(prescriptions, lambda found: rx.realize(model, found))
for finding in rx.verify(slim, model, splits.test, [controls], prescription=prescription).findings:
    print(f"{finding.claim}: {finding.value:.4g} {finding.unit} [{finding.low:.3g}, {finding.high:.3g}]")

# %% [markdown]
# ## What can go wrong
#
# - You report a change without an interval, or on images that were used for the selection. Diagnose and calibrate on
#   training images, and verify on test images.
# - You use only one seed. Run the command with several seeds, and compare the findings. Every finding contains its
#   seed.
# - You report latency without its conditions. The latency check times both models in turns, so other load slows both.
#   It records the hardware, the batch size and the threads. Its rounds run in four new processes, because latency
#   differs more between processes than between rounds. The interval is a t interval over the medians of the processes.
#   A file, or a model that cannot be pickled, is timed in one process. The finding's `interval` says how it was
#   computed. On another day, the latency can differ by more than the interval.
#
# ## The report
#
# `rx.write_report` writes one HTML file with all results, which you can open without a network. `evidence.save` writes
# a JSON file that contains every finding with value, limit, interval, n and seed.

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
# In scripts and CI, check the exit code of `attnrx verify`. It is 1 if a claim fails.
#
# ```bash
# attnrx verify slim --reference timm:vit_tiny_patch16_224 --data path/to/images --out evidence.json
# attnrx verify slim --reference timm:vit_tiny_patch16_224 --data path/to/images \
#     --diagnosis diagnosis.json --checks controls --out controls.json
# attnrx report --evidence evidence.json --out report.html
# ```
