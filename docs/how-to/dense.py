"""Features of all patches from a model whose tokens are merged: for segmentation, detection and retrieval."""

# %% [markdown]
# # Segmentation and detection: dense features
#
# You need one feature per patch, although the layers process fewer tokens. Attach a token policy and call the model as
# before. attnrx restores merged and pruned patches.

# %%
import os

import torch

import attnrx as rx

MODEL = os.environ.get("MODEL", "")  # yours: timm:vit_tiny_patch16_224, hf:ID, a folder saved by attnrx
DATA = os.environ.get("DATA", "")  # yours: a folder of images, parquet, or a known name

# %%
if MODEL:
    model = rx.load(MODEL)
    _, size, _ = rx.models.family_of(model).input_shape(model)
    splits = rx.adapt_preprocessing(rx.load_data(DATA, image_size=size), model)
else:
    from stand_in import model, splits  # a small ViT for handwritten digits, trained in seconds

# %%
small = rx.realize(model, rx.prescribe(model, "tokens=ward:0.7@2,3")).eval()
images = next(iter(splits.test.batches(8))).images
with torch.no_grad(), rx.models.recording_tokens(small) as runs:
    features = rx.models.family_of(small).patch_features(small, images)
print(f"features of {features.shape[1]} patches")
representatives = runs[-1].representatives()
print(f"the patches of an image share {representatives[0].unique().numel()} tokens")

# %% [markdown]
# A timm model also has its own methods: `small.forward_features(images)` and `small.forward_intermediates(images,
# indices=4)`. You call a transformers model as before: `small(pixel_values=images, output_hidden_states=True)`. For
# every patch, `representatives` contains the index of the token that represents it, or -1 if the patch was pruned.
#
# ## The error of the features

# %%
evidence = rx.verify(small, model, splits.test, [rx.checks.Features()])
for finding in evidence.findings:
    print(f"{finding.claim}: {finding.value:.3g} {finding.unit}".rstrip())

# %% [markdown]
# `attnrx verify small --reference MODEL --data DATA --checks features` does the same. For a model that returns
# embeddings, `retrieval` adds the share of the nearest neighbours that it keeps. To measure what a patch classifier
# loses, run `benchmarks/patch_probe.py`.
#
# ## What can go wrong
#
# - attnrx restores a pruned patch from the most similar kept patch. Merging (`ward`, `tome`) has a smaller error at the
#   same cost ([Dense features: measured](../results/dense.md)).
# - You cannot undo a heavy reduction in early layers. Measure the error before you choose a policy.
# - `rx.export(small, "features.onnx", features=True)` writes a file that returns these features. Without
#   `features=True` the file returns the model's usual output.
