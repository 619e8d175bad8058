"""Batch 1 on a CPU: latency of single images, in PyTorch and as a file."""

# %% [markdown]
# # Batch 1 on a CPU
#
# A camera or a request brings one image at a time. At batch 1, function calls and merging weigh more than at batch 32,
# and they do not shrink. Plan for batch 1, measure at batch 1, and prefer a file to eager PyTorch
# ([measured](../results/speed.md#how-fast-are-exported-files-beside-the-vendors-own-conversions)). In eager PyTorch a
# block is one call of a C++ kernel ([measured](../results/speed.md#what-does-one-image-cost-in-eager-pytorch)).

# %%
import os

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
image = next(iter(splits.test.batches(1))).images

# %% [markdown]
# ## Which candidates?
#
# Fewer hidden units make every product smaller and add no operation; one stage of merging adds a few. `rx.shrink(model,
# splits, faster=1.5, batch=1, threads=1)` measures blocks at batch 1 and decides; here two candidates are timed.

# %%
diagnosis = rx.diagnose(model, splits.train.take(96), moments=True)
candidates = {
    "half of the hidden units": rx.realize(model, rx.prescribe(diagnosis, "hidden=uniform_rank:0.5")),
    "one early stage of merging": rx.realize(model, rx.prescribe(model, "tokens=ward:0.6@2")),
}

# %% [markdown]
# ## In PyTorch
#
# In turns, on one thread, against the model in the kernels of its library. More rounds give narrower intervals.

# %%
protocol = rx.costs.LatencyProtocol(rx.costs.Conditions(threads=1), rounds=10)
for name, candidate in candidates.items():
    found = rx.costs.compare_latency(candidate, model, image, protocol).faster
    print(f"{name}: {found.value:.2f}x [{found.low:.2f}, {found.high:.2f}]")

# %% [markdown]
# ## As a file
#
# The same candidate in ONNX Runtime, against the original's file there, and against eager PyTorch of the original.

# %%
exported = rx.export(candidates["half of the hidden units"], "runs/half.onnx")
(found,) = rx.exporting.compare_with_original(exported, model, threads=1, batches=(1,), rounds=10)
print(f"the file: {found.faster.value:.2f}x the original's file")
found = rx.costs.compare_latency(exported, model, image, protocol).faster
print(f"the file: {found.value:.2f}x the original in PyTorch")

# %% [markdown]
# On the command line: `attnrx shrink MODEL --data DATA --faster 1.4 --batch 1 --threads 1 --to onnx --out faster`, or
# `--to 'openvino(precision=bf16)'` where the CPU computes in bfloat16. `--faster` then counts from the vendor's own
# file of your model, which is timed first.
#
# ## What can go wrong
#
# - A plan for batch 32 can be slower at batch 1: merging in every layer most of all.
# - A hook on a part of a block, gradients (use `torch.inference_mode()`), or autocast: its parts are called one by one.
# - Two threads at batch 1 help little on small models; measure with the threads that you deploy with.
# - This model is so small that calls of functions are most of its time: the numbers of this page are about the page.
