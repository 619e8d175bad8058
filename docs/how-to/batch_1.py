"""Makes a model faster for single images on a CPU, and measures its latency in PyTorch and as an exported file."""

# %% [markdown]
# # Batch 1 on a CPU
#
# A camera or a web request gives your model one image at a time. At batch 1, function calls and merging operations take
# a larger share of the time than at batch 32, and a smaller model does not reduce them. So plan for batch 1, measure at
# batch 1, and prefer an exported file to eager PyTorch
# ([measured](../results/speed.md#how-fast-are-exported-files-beside-the-vendors-own-conversions)). In eager PyTorch,
# attnrx computes a whole block in one call to a C++ kernel
# ([measured](../results/speed.md#what-does-one-image-cost-in-eager-pytorch)).

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
# Removing hidden units makes the products of the MLPs smaller and adds no operation. One stage of merging adds a few
# operations. `rx.shrink(model, splits, faster=1.5, batch=1, threads=1)` measures blocks at batch 1 and decides for you.
# This page times one candidate of each kind.

# %%
diagnosis = rx.diagnose(model, splits.train.take(96), moments=True)
candidates = {
    "half of the hidden units": rx.realize(model, rx.prescribe(diagnosis, "hidden=uniform_rank:0.5")),
    "one early stage of merging": rx.realize(model, rx.prescribe(model, "tokens=ward:0.6@2")),
}

# %% [markdown]
# ## In PyTorch
#
# `compare_latency` times each candidate and the original in turns, on one thread. The original runs in its library's
# own kernels. More rounds give narrower intervals.

# %%
protocol = rx.costs.LatencyProtocol(rx.costs.Conditions(threads=1), rounds=10)
for name, candidate in candidates.items():
    found = rx.costs.compare_latency(candidate, model, image, protocol).faster
    print(f"{name}: {found.value:.2f}x [{found.low:.2f}, {found.high:.2f}]")

# %% [markdown]
# ## As a file
#
# Now export the first candidate for ONNX Runtime. The next cell compares it with the original's file in that runtime,
# and with the original in eager PyTorch.

# %%
exported = rx.export(candidates["half of the hidden units"], "runs/half.onnx")
(found,) = rx.exporting.compare_with_original(exported, model, threads=1, batches=(1,), rounds=10)
print(f"the file: {found.faster.value:.2f}x the original's file")
found = rx.costs.compare_latency(exported, model, image, protocol).faster
print(f"the file: {found.value:.2f}x the original in PyTorch")

# %% [markdown]
# The same on the command line: `attnrx shrink MODEL --data DATA --faster 1.4 --batch 1 --threads 1 --to onnx --out
# faster`. If the CPU computes in bfloat16, use `--to 'openvino(precision=bf16)'`. With `--to`, `--faster` is relative
# to the vendor's own file of your model, which attnrx times first.
#
# ## What can go wrong
#
# - A plan for batch 32 can be slower at batch 1, above all if it merges in every layer.
# - If a part of a block has a hook, or if you use gradients or autocast, attnrx calls the parts of the block one by
#   one, which is slower. Use `torch.inference_mode()`.
# - On small models, a second thread hardly helps at batch 1. Measure with the number of threads that you deploy with.
# - This page's model is so small that function calls take most of its time. Your model will give other numbers.
