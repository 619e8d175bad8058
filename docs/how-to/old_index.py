"""Makes an embedding tower smaller, so that you can still search in the index that the original tower computed."""

# %% [markdown]
# # Search with an old index
#
# You have an index of image vectors that a large embedding tower computed. You want a smaller tower for new queries,
# without embedding all images again. So the smaller tower must find the same neighbours as the original, among the
# original's vectors.

# %%
import os

import torch

import attnrx as rx

MODEL = os.environ.get("MODEL", "")  # yours: timm:vit_base_patch16_siglip_224, open_clip:ViT-B-32 ...
DATA = os.environ.get("DATA", "")  # yours: a folder of images, parquet

# %%
if MODEL:
    tower = rx.load(MODEL, outputs="embedding")
    _, size, _ = rx.models.family_of(tower).input_shape(tower)
    splits = rx.adapt_preprocessing(rx.load_data(DATA, image_size=size), tower)
else:  # the features of a small ViT for handwritten digits, trained in seconds
    from stand_in import model, splits

    model.reset_classifier(0)
    tower = rx.load(model, outputs="embedding")

# %% [markdown]
# ## Your index
#
# The index contains the original's vectors, [images, features]. You have yours in a database. This page computes an
# example.

# %%
with torch.no_grad():
    index = torch.cat([tower(batch.images) for batch in splits.train.batches(64)])
print(f"{len(index):,} vectors of {index.shape[1]} numbers")

# %% [markdown]
# ## A smaller tower for this index
#
# `keep_index=True` fits the smaller tower to the original's vectors, by minimizing the cosine distance. It works with
# every `effort` and without labels. Pass at least 1,000 images that resemble your queries.

# %%
small = rx.shrink(tower, splits, macs=0.6, keep_index=True)
print(small.summary())

# %% [markdown]
# ## What new queries find
#
# `small.evidence` contains the check `index`. In this check, every test image is a query that searches among the other
# test images. To search in your own index, pass it as `stored`, and use queries that it does not contain. The next cell
# also shrinks the tower without `keep_index`, and compares the two results:

# %%
without = rx.shrink(tower, splits, macs=0.6)
check = rx.checks.Index(ks=(10,), stored=index)
for name, each in {"keep_index=True": small, "without": without}.items():
    (found,) = rx.verify(each.model, tower, splits.test, [check]).findings
    print(f"{name}: {found.claim}: {found.value:.1f} [{found.low:.1f}, {found.high:.1f}] {found.unit}")

# %% [markdown]
# ## A share of the neighbours as the target
#
# With `recall=0.95`, attnrx finds the plan with the fewest MACs that keeps 95 % of the 10 nearest neighbours. It tries
# plans on one part of the images and measures the evidence on another part. On the command line: `attnrx shrink TOWER
# --data images --recall 95%`.

# %%
small = rx.shrink(tower, splits, recall=0.95)
print(small.summary())

# %% [markdown]
# ## What can go wrong
#
# - In a larger index, neighbours are nearer to each other, so the smaller tower keeps fewer of them. Measure with your
#   own vectors.
# - The search on this page is exact. An approximate index loses some neighbours with either tower.
# - If you add images to the index with the smaller tower, the original's queries are compared with the smaller tower's
#   vectors. Without `stored`, the check also measures this case.
# - With `effort="quick"`, attnrx does not distill a tower of more than 5e9 MACs per image. Pass `effort="normal"`.
# - If no plan reaches the target, attnrx raises an error. The message contains the recall of the best plan.
# - If you embed all images again with the smaller tower, more neighbours stay the same. [Compare the neighbours in both
#   indexes](embeddings.md).
