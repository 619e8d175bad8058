"""A checkpoint that loads without attnrx: a smaller model of the library's own class, in the library's own files."""

# %% [markdown]
# # A checkpoint that loads without attnrx
#
# You want a smaller model that a server, a colleague or another tool loads with timm, transformers or torchvision, like
# any other checkpoint. Pass `portable=True`. The result is a model of the library's class with other sizes. On the
# command line: `attnrx shrink timm:NAME --data DATA --params 0.7 --portable --out runs/portable`.

# %%
import os

import onnx
import torch

import attnrx as rx

MODEL = os.environ.get("MODEL", "")  # yours: timm:vit_tiny_patch16_224, hf:ID, a folder of transformers
DATA = os.environ.get("DATA", "")  # yours: a folder of images, parquet, or a known name

# %%
if MODEL:
    model = rx.load(MODEL)
    _, size, _ = rx.models.family_of(model).input_shape(model)
    splits = rx.adapt_preprocessing(rx.load_data(DATA, image_size=size), model)
else:
    from stand_in import model, splits  # a small ViT for handwritten digits, trained in seconds

# %% [markdown]
# ## Shrink
#
# All MLPs get the same width, a multiple of 8 (`multiple=`). attnrx also prunes heads if the class has an argument for
# their number, as most transformers classes do. Your images decide which units stay in each layer. The result is
# repaired and verified as usual. With `faster=1.3`, the speed is measured in the library's own code.

# %%
shrunk = rx.shrink(model, splits, params=0.8, portable=True)
print(*shrunk.plan.explained)
print(f"{type(shrunk.model).__module__}: {sum(weight.numel() for weight in shrunk.model.parameters()):,} parameters")

# %% [markdown]
# ## Save
#
# The folder is the library's checkpoint. timm or transformers load its `config.json` and `model.safetensors`. The file
# `attnrx.json` is for `rx.load`. Evidence, report and model card are there as in every folder. The card contains the
# code that loads the model.

# %%
folder = shrunk.save("runs/portable", onnx=False)
print(sorted(path.name for path in folder.iterdir() if "tensors-" not in path.name))
code = rx.models.loading_code(shrunk.model, "runs/portable")
print(code)

# %% [markdown]
# ## Load it without attnrx
#
# This code needs only the library. The outputs are equal to the last bit.

# %%
loaded = {}
exec(code, loaded)
images = next(iter(splits.test.batches(8))).images
with torch.no_grad():
    difference = (loaded["model"](images) - shrunk.model.eval()(images)).abs().max()
print(f"largest difference: {float(difference)}")

# %% [markdown]
# ## Fewer blocks
#
# A library's class also has an argument for its number of blocks. `least_needed_blocks` removes blocks one after the
# other. Each time it removes the block that changes the outputs least. A plan never removes blocks. On pre-trained
# models a removed block costs more quality than narrower MLPs that save as much
# ([measured](../results/plan.md#what-does-a-removed-block-cost)). Distill such a model with many images.

# %%
depth = rx.planning.least_needed_blocks(model, splits.train.take(64), 1)
print(*depth.reasons)
shallower = rx.realize(model, rx.prescribe(model, {"depth": depth}, portable=True))
family = rx.models.family_of(model)
before, after = (len(family.block_names(each)) for each in (model, shallower))
print(f"{after} of {before} blocks")

# %% [markdown]
# ## A file for other runtimes
#
# TensorRT, Core ML and NPUs run the operations of a portable model: products, softmax, GELU and norms. Write an ONNX
# file with a fixed number of images and with operator set 17, which older versions also support. Pass the `multiple`
# from [the table](runtimes.md) to `shrink`, so that the widths fill the tiles of the device.

# %%
file = rx.export(shrunk.model, "runs/portable.onnx", to="onnx(opset=17)", batch=1)
print("operator set", onnx.load(file.path).opset_import[0].version)

# %% [markdown]
# We did **not run** the commands in the next three sections, because this project has no machine with these devices.
#
# ### TensorRT
#
# Shrink with `portable=True, multiple=64`. We measured these widths [on a
# GPU](../results/gpu.md#what-to-do-on-a-gpu), in PyTorch.
#
# ```
# trtexec --onnx=runs/portable.onnx --fp16 --saveEngine=portable.plan
# ```
#
# ### Core ML
#
# Shrink with `multiple=32`. The Neural Engine aligns the last axis of a buffer to 64 bytes. These are 32 numbers in
# half precision (Apple, "Deploying Transformers on the Apple Neural Engine"). ONNX Runtime passes the file to Core ML:
#
# ```python
# providers = ["CoreMLExecutionProvider", "CPUExecutionProvider"]
# session = onnxruntime.InferenceSession("runs/portable.onnx", providers=providers)
# ```
#
# For an `.mlpackage`, convert the program instead of the ONNX file (see [Deploy](deploy.md#phones-and-browsers)).
#
# ### An NPU
#
# An NPU accepts only fixed shapes (OpenVINO, "Supported Devices"). The file above has fixed shapes. Shrink with
# `multiple=64`.
#
# ```python
# compiled = openvino.Core().compile_model("runs/portable.onnx", "NPU")
# ```

# %% [markdown]
# ## What can go wrong
#
# - All layers have one width. After the repair, a separate width for each layer is hardly better
#   ([measured](../results/plan.md#what-does-one-width-for-all-layers-cost)). If you want separate widths, prescribe
#   `hidden=...` without `portable`, and save with `rx.save(small, "FOLDER", portable=True)`. The folder then contains
#   `modeling.py`, a short file that creates the model. transformers treats the file as remote code
#   (`trust_remote_code=True`). Whoever loads the model runs that file, so let them read it.
# - Reduced ranks of scores and values, and pruned or merged tokens, need attnrx. `rx.save(..., portable=True)` refuses
#   such models.
# - The library cannot create a head that you replaced. Create the model with the right arguments (`num_classes=10`),
#   load the weights into it, and shrink that model.
# - In DINOv2 of transformers, the width is a whole multiple of the embedding width. So its plans have few sizes.
# - If you edit a file of the folder, such as `config.json`, saving again does not overwrite it.
