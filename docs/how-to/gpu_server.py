"""Makes a model faster for large batches on a GPU, and records its kernels as a CUDA graph."""

# %% [markdown]
# # A GPU server
#
# On a GPU such as an H100, a model with fewer MACs is not always faster. Small models and small batches spend most of
# their time on kernel launches, and ranks that differ between heads cost more time than they save. For large batches,
# halve the hidden units in multiples of 64, merge tokens in one or two early layers, and record a CUDA graph
# ([measured](../results/gpu.md)).

# %%
import os

import torch

import attnrx as rx

MODEL = os.environ.get("MODEL", "")  # yours: timm:vit_base_patch16_224, hf:ID, a folder saved by attnrx
DATA = os.environ.get("DATA", "")  # yours: a folder of images, parquet, or a known name
LAYERS = os.environ.get("LAYERS", "2")  # with twelve layers, take 3,6
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
# The rule `hidden=uniform_rank:0.5` keeps the units without which the block's output would change most. attnrx then
# refits the MLP's second linear map by least squares. You need no labels.

# %%
diagnosis = rx.diagnose(model, splits.train.take(256), moments=True)
prescription = rx.prescribe(diagnosis, f"hidden=uniform_rank:0.5,multiple=64 tokens=ward:0.7@{LAYERS}")
small = rx.realize(model, prescription)
print("hidden units:", [int(layer.hidden.keep.sum()) for layer in prescription.layers])
before, after = (rx.models.family_of(each).costs(each).macs for each in (model, small))
print(f"{100 * after / before:.0f} % of the MACs")

# %% [markdown]
# To recover most of the loss, call `rx.distill(small, model, images)`, or `rx.repair` if no tokens are merged. Neither
# needs labels.
#
# ## Record it
#
# A CUDA graph launches all kernels of a forward pass at once. The first call with a new batch shape records the graph.
# The next call overwrites the returned tensor, so copy it if you need it longer.

# %%
images = torch.randn(BATCH, *rx.models.family_of(model).input_shape(model), device=device)
fast = rx.costs.Conditions(device, graphs=device == "cuda").prepare(small)
with torch.inference_mode():
    answers = fast(images)
print(f"answers: {list(answers.shape)}")

# %% [markdown]
# ## What can go wrong
#
# - A model that was planned for a number of MACs can be slower on a GPU. Plan for a speed instead: `rx.shrink(model,
#   images, faster=1.2, batch=256)` times every plan as a CUDA graph. First move the model to the GPU, in the precision
#   that you will use (`model.bfloat16()`).
# - At batch 1, compression hardly helps. If both run as graphs, models with half of the hidden units are 1.01 to 1.07
#   times as fast as timm's. All other reductions make the model slower. A graph of timm's unchanged ViT-S is 6.4 times
#   as fast as the model without a graph.
