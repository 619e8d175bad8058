"""Make an embedding tower smaller, and continue to search in the index that you made with the original."""

# %% [markdown]
# # Search with an old index
#
# You have an index with vectors of many images, made by a large tower. You want cheaper queries, and do not want to
# embed the images again. So the smaller tower must find the original's neighbours among the original's vectors.

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
# The index holds the original's vectors, [images, features]. Yours are in your database. The page computes an example.

# %%
with torch.no_grad():
    index = torch.cat([tower(batch.images) for batch in splits.train.batches(64)])
print(f"{len(index):,} vectors of {index.shape[1]} numbers")

# %% [markdown]
# ## A smaller tower for this index
#
# `keep_index=True` fits the smaller tower to the original's vectors. Every effort then minimizes the cosine distance to
# them. attnrx uses no labels. Pass at least 1,000 images of the kind that you search with.

# %%
small = rx.shrink(tower, splits, macs=0.6, keep_index=True)
print(small.summary)

# %% [markdown]
# ## What new queries find
#
# `small.evidence` contains the check `index`: every test image is a query, and the other test images are the index. To
# search in your own index, pass it as `stored`, and use queries that it does not contain. The example also reaches the
# same target without `keep_index`, and compares the two results:

# %%
without = rx.shrink(tower, splits, macs=0.6)
check = rx.checks.Index(ks=(10,), stored=index)
for name, each in {"keep_index=True": small, "without": without}.items():
    (found,) = rx.verify(each.model, tower, splits.test, [check]).findings
    print(f"{name}: {found.claim}: {found.value:.1f} [{found.low:.1f}, {found.high:.1f}] {found.unit}")

# %% [markdown]
# ## A share of the neighbours as the target
#
# `recall=0.95` plans for the fewest MACs that keep 95 % of the 10 nearest neighbours. attnrx tries the plans on other
# images than it uses for the evidence. On the command line: `attnrx shrink TOWER --data images --recall 95%`.

# %%
small = rx.shrink(tower, splits, recall=0.95)
print(small.summary)

# %% [markdown]
# ## What can go wrong
#
# - In a larger index the neighbours are nearer to each other, and it is harder to keep them. Measure with your own
#   vectors.
# - The search here is exact. An approximate index loses some neighbours with either tower.
# - If you add images with the smaller tower, old queries are compared with new vectors. Without `stored`, the check
#   also measures this direction.
# - A quick call does not distill a tower of more than 5e9 MACs per image. Pass `effort="normal"`.
# - If no plan reaches the target, attnrx raises an error. The message states the recall of the best plan.
# - If you embed the images again, [compare the neighbours in both indexes](embeddings.md). They are easier to keep.
