"""Makes an embedding tower smaller, and measures which nearest neighbours stay the same."""

# %% [markdown]
# # An embedding tower
#
# An embedding tower (CLIP, SigLIP, DINOv2) returns a vector for retrieval, deduplication or zero-shot classification.
# Because it predicts no classes, attnrx does not measure accuracy. It measures the cosine distance between the vectors
# of both models, and how many nearest neighbours stay the same.

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
# If you have a target, call `rx.shrink(model, splits, faster=1.3, batch=32)`. It chooses what to remove, and the
# result's `model` replaces the tower in your loop. A ViT-S takes about six minutes on two CPU cores. You can pass the
# tower without loading it first. On this page, you write the rules yourself, which takes seconds. Neither way uses
# labels.
#
# attnrx compares the vectors that you would store: `pooler_output` of CLIP's and SigLIP's towers in transformers, and
# the class token, `last_hidden_state[:, 0]`, of DINOv2.

# %%
diagnosis = rx.diagnose(model, splits.train.take(96), moments=True)
prescription = rx.prescribe(diagnosis, "qk=total_rank:0.75 hidden=uniform_rank:0.75 tokens=ward:0.8@3")
small = rx.realize(model, prescription)
before, after = (rx.models.family_of(each).costs(each).macs for each in (model, small))
print(f"{100 * after / before:.0f} % of the MACs")

# %% [markdown]
# ## What it costs
#
# The check `Fidelity` compares the vectors, and `Retrieval` compares the neighbours of every image. To measure how many
# images change their zero-shot class, pass your own divergence. If `texts` contains the text tower's vector for every
# class, call `rx.verify(..., divergence=lambda a, b: ((a @ texts.T).argmax(-1) != (b @ texts.T).argmax(-1)).float())`.

# %%
checks = [rx.checks.Fidelity(), rx.checks.Retrieval(ks=(1, 5))]
for finding in rx.verify(small, model, splits.test.take(256), checks).findings:
    print(f"{finding.claim}: {finding.value:.3g} {finding.unit}".rstrip())

# %% [markdown]
# ## What can go wrong
#
# - Your index contains the original's vectors. The smaller model's vectors are near these vectors, but not equal. Embed
#   the images again, or fit the smaller model to your index ([Search with an old index](old_index.md)).
# - You want to compress both towers of a pair. Load each tower and verify it separately.
# - A tower that `rx.load` reads from a folder computes in PyTorch's code. For float32 on a CPU, call
#   `rx.accelerate(tower)`, which returns a copy for inference in attnrx's kernels. `shrink` returns such a copy.
# - The loss is too large. `rx.repair(small, model, images)` and `rx.distill(...)` fit the smaller model's vectors to
#   the original's, without labels.
