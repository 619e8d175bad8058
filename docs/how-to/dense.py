"""Gets the features of all patches from a model that merges tokens, for segmentation, detection and retrieval."""

# %% [markdown]
# # Segmentation and detection: dense features
#
# Segmentation and detection need one feature per patch, even if the layers process fewer tokens. Attach a token policy
# and call the model as before. attnrx restores merged and pruned patches in the output.

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
# In the cell above, `representatives` contains the index of the token that represents each patch, or -1 if the patch
# was pruned. A timm model keeps its methods `small.forward_features(images)` and `small.forward_intermediates(images,
# indices=4)`. You call a transformers model as before: `small(pixel_values=images, output_hidden_states=True)`.
#
# ## The error of the features

# %%
evidence = rx.verify(small, model, splits.test, [rx.checks.Features()])
for finding in evidence.findings:
    print(f"{finding.claim}: {finding.value:.3g} {finding.unit}".rstrip())

# %% [markdown]
# On the command line, `attnrx verify small --reference MODEL --data DATA --checks features` runs the same check. If
# your model returns embeddings, add the check `retrieval`, which measures the share of nearest neighbours that the
# smaller model keeps. To measure how much a classifier of patches loses, run `benchmarks/patch_probe.py`.
#
# ## What can go wrong
#
# - You prune instead of merging. attnrx restores a pruned patch from the most similar kept patch, but merging (`ward`,
#   `tome`) has a smaller error at the same cost ([Dense features: measured](../results/dense.md)).
# - You remove many tokens in early layers. Their features cannot be restored well. Measure the error before you choose
#   a policy.
# - You export without `features=True`, and the file returns the model's usual output. `rx.export(small,
#   "features.onnx", features=True)` writes a file that returns the features of all patches.
