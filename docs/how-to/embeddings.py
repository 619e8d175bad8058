"""Make an embedding tower smaller, and measure which neighbours it keeps."""

# %% [markdown]
# # An embedding tower
#
# A tower has no classes: its answer is a vector for retrieval, deduplication or zero-shot classification (CLIP, SigLIP,
# DINOv2). So attnrx measures the cosine distance of the vectors and the neighbours that stay, not accuracy.

# %%
import os

import timm
import torch

import attnrx as rx

MODEL = os.environ.get("MODEL", "")  # yours: timm:vit_base_patch16_siglip_224, hf:openai/clip-vit-base-patch32 ...
DATA = os.environ.get("DATA", "digits")  # yours: a folder of images, parquet

# %%
if MODEL:
    model = rx.load(MODEL, outputs="embedding")
else:  # a small tower with random weights, so that the page runs without a download
    torch.manual_seed(0)
    tower = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=96, depth=4, num_classes=0)
    model = rx.load(tower, outputs="embedding")
_, size, _ = rx.models.family_of(model).input_shape(model)
splits = rx.adapt_preprocessing(rx.load_data(DATA, image_size=size), model)

# %% [markdown]
# ## Smaller
#
# For a target, `rx.shrink(model, splits, macs=0.6)` chooses the plan; here you state the plan. Neither uses labels.

# %%
diagnosis = rx.diagnose(model, splits.train.take(96), moments=True)
prescription = rx.prescribe(diagnosis, "qk=total_rank:0.75 hidden=uniform_rank:0.75 tokens=ward:0.8@3")
small = rx.realize(model, prescription)
before, after = (rx.models.family_of(each).costs(each).macs for each in (model, small))
print(f"{100 * after / before:.0f} % of the MACs")

# %% [markdown]
# ## What it costs
#
# `fidelity` compares the vectors, `retrieval` the neighbours of every image. The share of other zero-shot classes is a
# divergence of your own: with one vector per class of the text tower,
# `rx.verify(..., divergence=lambda a, b: ((a @ texts.T).argmax(-1) != (b @ texts.T).argmax(-1)).float())`.

# %%
checks = [rx.checks.Fidelity(), rx.checks.Retrieval(ks=(1, 5))]
for finding in rx.verify(small, model, splits.test.take(256), checks).findings:
    print(f"{finding.claim}: {finding.value:.3g} {finding.unit}".rstrip())

# %% [markdown]
# ## What can go wrong
#
# - An index holds vectors of the original. Vectors of the smaller model are near, not equal: embed the index again, or
#   [search with the old index](old_index.md), for which the smaller model can be fitted.
# - Both towers of a pair can be compressed; each is loaded and compared by itself.
# - Repair and distillation fit the vectors themselves: `rx.repair(small, model, images)`, `rx.distill(...)`.
