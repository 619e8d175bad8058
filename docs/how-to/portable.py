"""Makes a smaller model of the library's own class, and saves a checkpoint that loads without attnrx."""

# %% [markdown]
# # A checkpoint that loads without attnrx
#
# You want a smaller model that a server, a colleague or another tool can load with only timm, transformers or
# torchvision, like any other checkpoint. Pass `portable=True`. The result is a model of the library's class, created
# with smaller sizes. On the command line: `attnrx shrink timm:NAME --data DATA --params 0.7 --portable --out
# runs/portable`.

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
# A portable model has one MLP width in all layers, which is a multiple of 8 (`multiple=`). attnrx also prunes heads if
# the class has an argument for their number, as most transformers classes do. Your images decide which units each layer
# keeps. The result is repaired and verified as usual. With `faster=1.3`, the speed is measured in the library's own
# code.

# %%
shrunk = rx.shrink(model, splits, params=0.8, portable=True)
print(*shrunk.plan.explained)
print(f"{type(shrunk.model).__module__}: {sum(weight.numel() for weight in shrunk.model.parameters()):,} parameters")

# %% [markdown]
# ## Save
#
# `shrunk.save` writes a checkpoint in the library's format. timm or transformers read `config.json` and
# `model.safetensors`, and `rx.load` also reads `attnrx.json`. As in every folder, there are evidence, a report and a
# model card. The card contains the code that loads the model.

# %%
folder = shrunk.save("runs/portable", onnx=False)
print(sorted(path.name for path in folder.iterdir() if "tensors-" not in path.name))
code = rx.models.loading_code(shrunk.model, "runs/portable")
print(code)

# %% [markdown]
# ## Load it without attnrx
#
# The code from the model card needs only the library. The loaded model has the same outputs to the last bit.

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
# You can also remove whole blocks, because the library's class has an argument for their number. `least_needed_blocks`
# repeatedly removes the block whose removal changes the outputs least. Plans never remove blocks. On pre-trained
# models, a removed block costs more quality than narrower MLPs that save the same number of MACs
# ([measured](../results/plan.md#what-does-a-removed-block-cost)). Distill a model with fewer blocks on many images.

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
# TensorRT, Core ML and NPUs support all operations in a portable model: products, softmax, GELU and norms. Export an
# ONNX file with a fixed batch size and operator set 17, which older versions of these tools also read. Pass the
# `multiple` from [the table](runtimes.md) to `shrink`, so that the widths fill the device's tiles.

# %%
file = rx.export(shrunk.model, "runs/portable.onnx", to="onnx(opset=17)", batch=1)
print("operator set", onnx.load(file.path).opset_import[0].version)

# %% [markdown]
# We did **not run** the commands in the next three sections, because we have no machine with these devices.
#
# ### TensorRT
#
# Shrink with `portable=True, multiple=64`. We measured the speed of such widths [on a
# GPU](../results/gpu.md#what-to-do-on-a-gpu), but in PyTorch and not in TensorRT.
#
# ```
# trtexec --onnx=runs/portable.onnx --fp16 --saveEngine=portable.plan
# ```
#
# ### Core ML
#
# Shrink with `multiple=32`. The Neural Engine aligns the last axis of a buffer to 64 bytes, which hold 32 numbers in
# half precision (Apple, "Deploying Transformers on the Apple Neural Engine"). ONNX Runtime can pass the file to Core
# ML:
#
# ```python
# providers = ["CoreMLExecutionProvider", "CPUExecutionProvider"]
# session = onnxruntime.InferenceSession("runs/portable.onnx", providers=providers)
# ```
#
# To make an `.mlpackage`, convert a program instead of the ONNX file (see [Deploy](deploy.md#phones-and-browsers)).
#
# ### An NPU
#
# Shrink with `multiple=64`. An NPU accepts only fixed shapes (OpenVINO, "Supported Devices"), which the exported file
# above has.
#
# ```python
# compiled = openvino.Core().compile_model("runs/portable.onnx", "NPU")
# ```

# %% [markdown]
# ## What can go wrong
#
# - You want a different width in each layer. After the repair, separate widths are hardly better
#   ([measured](../results/plan.md#what-does-one-width-for-all-layers-cost)). If you still want them, prescribe
#   `hidden=...` without `portable`, and save with `rx.save(small, "FOLDER", portable=True)`. The folder then contains
#   `modeling.py`, a short file that creates the model. transformers treats it as remote code
#   (`trust_remote_code=True`). Users who load the model run this file, so ask them to read it first.
# - Reduced ranks of scores and values, and pruned or merged tokens, need attnrx. `rx.save(..., portable=True)` refuses
#   such models.
# - You replaced the model's head, and the library cannot create yours. Create the model with the right arguments
#   (`num_classes=10`), load the weights into it, and shrink that model.
# - In transformers' DINOv2, the MLP width must be an integer multiple of the embedding width. So few sizes are
#   possible.
# - You edited a file in the folder, such as `config.json`. Saving again does not overwrite your changes.
