"""Make a ViT smaller with your own images: diagnose, prescribe, realize, verify, save."""

# %% [markdown]
# # Make a classifier smaller
#
# You have a trained model and images like those it was trained on. You want a smaller model, with evidence of the
# quality that it loses. You need labels only to measure accuracy. Nothing is trained.

# %%
import os

import torch

import attnrx as rx

MODEL = os.environ.get("MODEL", "")  # yours: timm:vit_tiny_patch16_224, hf:ID, a folder saved by attnrx
DATA = os.environ.get("DATA", "")  # yours: a folder of images, parquet, or a known name

# %% [markdown]
# ## A model and images
#
# `rx.load` adopts a timm or Hugging Face model. It returns a copy with the same logits, and attnrx can decompose and
# compress the attention of the copy. You can pass an instance instead of a name. `rx.adapt_preprocessing` puts the
# images on the scale that the model was trained with. It raises DataError for images that do not fit.

# %%
if MODEL:
    model = rx.load(MODEL)
    _, size, _ = rx.models.family_of(model).input_shape(model)
    splits = rx.adapt_preprocessing(rx.load_data(DATA, image_size=size), model)
else:
    from stand_in import model, splits  # a small ViT for handwritten digits, trained in seconds

# %% [markdown]
# ## Diagnose
#
# A diagnosis is one pass over some images, without labels. For every layer it contains the directions and strengths of
# the scores (the layer's *spectrum*), and named readings for every head and direction. It also contains the moments of
# the inputs of values and MLP.

# %%
diagnosis = rx.diagnose(model, splits.train.take(96))
first = diagnosis.layers[0]
print(f"{len(diagnosis.layers)} layers; directions of the first: {first.spectrum.used.sum(-1).tolist()} per head")

# %% [markdown]
# ## Prescribe
#
# Write one rule for every map: `qk` for the scores, `vo` for value and output, `fc1` and `fc2` for the MLP.
# `total_rank:0.5` keeps half of the directions of every layer, and divides them among the heads by their spectra. The
# prescription states a reason for every head.

# %%
prescription = rx.prescribe(diagnosis, "qk=total_rank:0.5 vo=total_rank:0.75 fc1=uniform_rank:0.5 fc2=uniform_rank:0.5")
for layer, ranks in enumerate(prescription.ranks, start=1):
    print(f"layer {layer} keeps {ranks} directions")
print(prescription.layers[0].qk.reasons[0])

# %% [markdown]
# attnrx computes the cost of a prescription in closed form, before it builds anything. If you have a target, `rx.plan`
# chooses the ranks of every layer ([how](plan.md)).

# %%
costs = rx.planning.prescribed_costs(model, prescription)
print(f"share of the MACs: {costs.macs / rx.models.family_of(model).costs(model).macs:.3f}")

# %% [markdown]
# ## Realize
#
# Realize the prescription as a mask (same shapes, zeros) or as a smaller model. Both are copies, and their logits are
# equal. Your original model does not change.

# %%
masked = rx.realize(model, prescription, by="mask")
slim = rx.realize(model, prescription)

before, after = (rx.models.family_of(each).costs(each) for each in (model, slim))
print(f"parameters: {before.params:,} -> {after.params:,}")
print(f"MACs of an image: {before.macs:,} -> {after.macs:,}")

batch = next(iter(splits.test.take(32).batches(32)))
with torch.inference_mode():
    difference = (masked.eval()(batch.images) - slim.eval()(batch.images)).abs().max()
print(f"mask and smaller model differ in their logits by at most {difference:.1e}")

# %% [markdown]
# `repair` recovers part of the loss without labels. It fits every block to the outputs of the original's block.

# %%
repaired = rx.repair(slim, model, splits.train.take(512))
print("relative squared error of the outputs, by block")
print("before:", [f"{value:.1e}" for value in repaired.before])
print("after: ", [f"{value:.1e}" for value in repaired.after])

# %% [markdown]
# ## Verify
#
# The findings are paired on the same images: accuracy before and after, distance of the logits, and savings. Each has
# an interval. Without `checks=`, `verify` runs the standard checks, which include latency and calibration ([how to read
# them](evidence.md)).

# %%
checks = [rx.checks.Accuracy(most_drop=2.0), rx.checks.Fidelity(), rx.checks.Costs()]
evidence = rx.verify(repaired.model, model, splits.test, checks, prescription=prescription)
for finding in evidence.findings:
    interval = "" if finding.low is None else f"  [{finding.low:.3g}, {finding.high:.3g}]"
    print(f"{finding.claim}: {finding.value:.4g} {finding.unit}{interval}")

# %% [markdown]
# ## Save
#
# The folder contains the weights, the prescription with its reasons, the evidence, and a model card. The tensors of the
# prescription are in a file with their hash in its name. `rx.load` loads the folder. If you save into the folder again,
# attnrx replaces all of these files at once. It keeps every file that it did not write.

# %%
folder = rx.save(repaired.model, "slim", prescription=prescription, evidence=evidence)
print(sorted(path.name for path in folder.iterdir() if ".tensors-" not in path.name))
again = rx.load(folder)

# %% [markdown]
# ## The same on the command line
#
# ```bash
# attnrx diagnose timm:vit_tiny_patch16_224 --data path/to/images --out diagnosis.json
# attnrx prescribe diagnosis.json --out prescription.json \
#     --rules qk=total_rank:0.5 vo=total_rank:0.75 fc1=uniform_rank:0.5 fc2=uniform_rank:0.5
# attnrx realize timm:vit_tiny_patch16_224 --prescription prescription.json --out slim
# attnrx verify slim --reference timm:vit_tiny_patch16_224 --data path/to/images --out evidence.json
# attnrx report --evidence evidence.json --prescription prescription.json --diagnosis diagnosis.json --out report.html
# ```
