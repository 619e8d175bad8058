"""A GPU server: what makes a large batch faster on a device that is bound by launches, and how to record it."""

# %% [markdown]
# # A GPU server
#
# On an H100 fewer MACs are not less time. Small models and small batches are bound by launching kernels, and ranks that
# differ between heads take back what they save. At a large batch, halve the hidden units in multiples of 64, merge
# tokens in one or two early layers, and record a CUDA graph ([measured](../results/gpu.md)).

# %%
import os

import torch

import attnrx as rx

MODEL = os.environ.get("MODEL", "")  # yours: timm:vit_base_patch16_224, hf:ID, a folder saved by attnrx
DATA = os.environ.get("DATA", "")  # yours: a folder of images, parquet, or a known name
LAYERS = os.environ.get("LAYERS", "2")  # of twelve layers one would take 3,6
BATCH = int(os.environ.get("BATCH", "64"))
device = "cuda" if torch.cuda.is_available() else "cpu"  # the page runs on both

# %%
if MODEL:
    model = rx.load(MODEL)
    _, size, _ = rx.models.family_of(model).input_shape(model)
    splits = rx.adapt_preprocessing(rx.load_data(DATA, image_size=size), model)
else:
    from stand_in import model, splits  # a small ViT for handwritten digits, trained in seconds
model = model.to(device)

# %% [markdown]
# ## Halve the hidden units
#
# attnrx selects the units by what the block loses without them and refits the second map by least squares. You need no
# labels.

# %%
diagnosis = rx.diagnose(model, splits.train.take(256), moments=True)
prescription = rx.prescribe(diagnosis, f"hidden=uniform_rank:0.5,multiple=64 tokens=ward:0.7@{LAYERS}")
small = rx.realize(model, prescription)
print("hidden units:", [int(layer.hidden.keep.sum()) for layer in prescription.layers])
before, after = (rx.models.family_of(each).costs(each).macs for each in (model, small))
print(f"{100 * after / before:.0f} % of the MACs")

# %% [markdown]
# Then call `rx.distill(small, model, images)`, or `rx.repair` if nothing is merged. Both need no labels and give back
# most of what this costs.
#
# ## Record it
#
# A CUDA graph replays all kernels of a pass with one call. The first call with a batch shape records it. An answer is
# valid until the next call.

# %%
images = torch.randn(BATCH, *rx.models.family_of(model).input_shape(model), device=device)
fast = rx.costs.Conditions(device, graphs=device == "cuda").prepare(small)
with torch.inference_mode():
    answers = fast(images)
print(f"answers: {list(answers.shape)}")

# %% [markdown]
# ## What can go wrong
#
# - A target of MACs can make a model slower on a GPU. State a target of time, `rx.shrink(model, images, faster=1.2,
#   batch=256)`, which times every plan as a CUDA graph. Put the model on the device first, in the precision you will
#   use (`model.bfloat16()`).
# - At batch 1 half of the hidden units gain a tenth as a graph, and nothing else does; the graph alone makes timm's
#   ViT-S 7.7 times as fast.
# - `torch.compile` makes the unchanged model slower than timm's compiled one; a recorded graph does not.
