"""Makes a ViT smaller with your own images, in five steps: diagnose, prescribe, realize, verify, save."""

# %% [markdown]
# # Make a classifier smaller
#
# You have a trained classifier, and images like the ones it was trained on. This page makes the model smaller in five
# steps, without training, and measures how much quality it loses. You need labels only to measure accuracy.

# %%
import os

import torch

import attnrx as rx

MODEL = os.environ.get("MODEL", "")  # yours: timm:vit_tiny_patch16_224, hf:ID, a folder saved by attnrx
DATA = os.environ.get("DATA", "")  # yours: a folder of images, parquet, or a known name

# %% [markdown]
# ## A model and images
#
# `rx.load` loads a timm or Hugging Face model by its name, or copies a model that you pass. The result has the same
# logits, and attnrx can decompose and compress its attention. `rx.adapt_preprocessing` normalizes the images as the
# model expects. It raises `DataError` if the images do not fit the model.

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
# `rx.diagnose` runs the model once on some images, without labels. For every layer, the diagnosis contains the
# directions and strengths of the attention scores (the layer's *spectrum*), and measurements (*readings*) for every
# head and direction. It also contains second moments of the inputs to values and MLPs.

# %%
diagnosis = rx.diagnose(model, splits.train.take(96))
first = diagnosis.layers[0]
print(f"{len(diagnosis.layers)} layers; directions of the first: {first.spectrum.used.sum(-1).tolist()} per head")

# %% [markdown]
# ## Prescribe
#
# `rx.prescribe` decides which directions to keep. Write one rule for every map: `qk` for the scores, `vo` for value and
# output projections, `fc1` and `fc2` for the MLP. `total_rank:0.5` keeps half of the directions in every layer, and
# divides them among the heads by their spectra. The prescription contains a reason for every head.

# %%
prescription = rx.prescribe(diagnosis, "qk=total_rank:0.5 vo=total_rank:0.75 fc1=uniform_rank:0.5 fc2=uniform_rank:0.5")
for layer, ranks in enumerate(prescription.ranks, start=1):
    print(f"layer {layer} keeps {ranks} directions")
print(prescription.layers[0].qk.reasons[0])

# %% [markdown]
# You can compute the cost of a prescription before you build the smaller model. If you have a target, `rx.plan` chooses
# the ranks of every layer ([how](plan.md)).

# %%
costs = rx.planning.prescribed_costs(model, prescription)
print(f"share of the MACs: {costs.macs / rx.models.family_of(model).costs(model).macs:.3f}")

# %% [markdown]
# ## Realize
#
# `rx.realize` applies the prescription to a copy of the model. The copy is a smaller model or, with `by="mask"`, a
# model of the same size in which removed directions are set to zero. Both have equal logits. Your original model does
# not change.

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
# `rx.repair` recovers part of the loss without labels. It fits every block to the outputs of the original's block.

# %%
repaired = rx.repair(slim, model, splits.train.take(512))
print("relative squared error of the outputs, by block")
print("before:", [f"{value:.1e}" for value in repaired.before])
print("after: ", [f"{value:.1e}" for value in repaired.after])

# %% [markdown]
# ## Verify
#
# `rx.verify` measures both models on the same test images: accuracy before and after, the distance of the logits, and
# the savings. Measured quantities have intervals. If you omit `checks=`, `rx.verify` runs the standard checks, which
# include latency and calibration ([how to read them](evidence.md)).

# %%
checks = [rx.checks.Accuracy(most_drop=2.0), rx.checks.Fidelity(), rx.checks.Costs()]
evidence = rx.verify(repaired.model, model, splits.test, checks, prescription=prescription)
for finding in evidence.findings:
    interval = "" if finding.low is None else f"  [{finding.low:.3g}, {finding.high:.3g}]"
    print(f"{finding.claim}: {finding.value:.4g} {finding.unit}{interval}")

# %% [markdown]
# ## Save
#
# `rx.save` writes a folder with the weights, the prescription and its reasons, the evidence, and a model card. The
# tensors of the prescription are in a separate file, whose name contains their hash. `rx.load` loads the folder. If you
# save into the folder again, attnrx replaces all of these files at once, and keeps files that it did not write.

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
