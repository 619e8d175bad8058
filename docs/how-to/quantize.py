"""Quantizes a smaller model with NNCF, ONNX Runtime and other tools, and measures the accuracy that each tool costs."""

# %% [markdown]
# # Quantize afterwards
#
# You made a model smaller, and now want to quantize its file with a standard tool: `nncf.quantize` for OpenVINO, ONNX
# Runtime's quantizers, or a conversion to half precision. Quantization costs a smaller model about as much accuracy as
# the original. You need `pip install 'attnrx[onnx,openvino]' nncf onnxconverter-common`. The page skips tools that are
# not installed.

# %%
import contextlib
import importlib.util
import io
import logging
import os
from pathlib import Path
from types import SimpleNamespace

import onnxruntime
import torch
from onnxruntime import quantization

import attnrx as rx

MODEL = os.environ.get("MODEL", "")  # yours: timm:vit_tiny_patch16_224, hf:ID, a folder saved by attnrx
DATA = os.environ.get("DATA", "")  # yours: a folder of images, parquet, or a known name
OUT = Path(os.environ.get("OUT", "runs/quantize"))
OUT.mkdir(parents=True, exist_ok=True)
logging.disable(logging.WARNING)  # hides the warnings of the tools

# %%
if MODEL:
    model = rx.load(MODEL)
    _, size, _ = rx.models.family_of(model).input_shape(model)
    splits = rx.adapt_preprocessing(rx.load_data(DATA, image_size=size), model)
else:
    from stand_in import model, splits  # a small ViT for handwritten digits, trained in seconds

slim = rx.realize(model, rx.prescribe(model, "tokens=ward:0.8@2,3"))
calibration = next(iter(splits.train.take(64).batches(64))).images  # already normalized
images = next(iter(splits.test.take(200).batches(200))).images
with torch.no_grad():
    wanted = slim(images).argmax(-1)


def unchanged(logits) -> str:
    return (
        f"{100 * float((torch.as_tensor(logits).argmax(-1) == wanted).float().mean()):.1f} % of the answers unchanged"
    )


# %% [markdown]
# ## NNCF, for OpenVINO
#
# Always pass `model_type`. Without it, NNCF also quantizes the additions between the blocks, which ruins the outputs of
# most Vision Transformers, including timm's unchanged model.

# %%
xml = rx.export(slim, OUT / "slim-openvino.xml", to="openvino").path
if importlib.util.find_spec("nncf"):
    import nncf
    import openvino

    dataset = nncf.Dataset(calibration.split(1), lambda image: image.numpy())
    read = openvino.Core().read_model(str(xml))
    with contextlib.redirect_stdout(io.StringIO()):  # progress
        quantized = nncf.quantize(read, dataset, model_type=nncf.ModelType.TRANSFORMER)
    openvino.save_model(quantized, str(OUT / "slim-nncf.xml"))
    print("nncf:", unchanged(openvino.Core().compile_model(quantized, "CPU")(images.numpy())[0]))

# %% [markdown]
# ## ONNX Runtime
#
# Pass the types of operations to quantize (`op_types_to_quantize`), because ONNX Runtime's quantizers otherwise convert
# many more operations than linear maps. Dynamic quantization needs no images. But by default it confuses ONNX's
# attention with another operation of the same name, and writes a file that no session can open. To avoid this error,
# pass the types, or export the file with `to="onnx(opset=22)"`. In that file, attention consists of two products and a
# softmax, which take a few percent more time.

# %%
maps = ["MatMul", "Gemm"]
onnx_file = rx.export(slim, OUT / "slim.onnx").path


def run(path: Path, dtype: torch.dtype = torch.float32):
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, {"images": images.to(dtype).numpy()})[0]


batches = iter(calibration.split(16))
reader = SimpleNamespace(get_next=lambda: next(({"images": batch.numpy()} for batch in batches), None))
quantization.quantize_static(onnx_file, OUT / "slim-static.onnx", reader, op_types_to_quantize=maps)
print("static:", unchanged(run(OUT / "slim-static.onnx")))
quantization.quantize_dynamic(onnx_file, OUT / "slim-dynamic.onnx", op_types_to_quantize=maps)
print("dynamic:", unchanged(run(OUT / "slim-dynamic.onnx")))

# %% [markdown]
# ## Half precision
#
# Merging tokens needs a scatter-add, which ONNX Runtime does not support in half precision on a CPU. If the file must
# run on a CPU, keep `ScatterElements` in float32.

# %%
if importlib.util.find_spec("onnxconverter_common"):
    import onnx
    from onnxconverter_common import float16

    kept = [*float16.DEFAULT_OP_BLOCK_LIST, "ScatterElements"]
    converted = float16.convert_float_to_float16(onnx.load(onnx_file), op_block_list=kept)
    onnx.save(converted, OUT / "slim-half.onnx")
    print("half:", unchanged(run(OUT / "slim-half.onnx", torch.float16)))

# %% [markdown]
# ## What can go wrong
#
# - A quantizer with other settings may also quantize the comparison of tokens. Before you deploy the file, compare its
#   answers with the model's, as above.
# - In some pre-trained models, a few features are a hundred times larger than all others. With 8 bits, such models lose
#   much accuracy, with or without attnrx. NNCF's SmoothQuant first divides these features by a factor. If you
#   export with `to="int8"` ([Deploy](deploy.md)), attnrx also leaves the maps in float that 8 bits cannot hold.
# - An older runtime or tool may not support the newest operator set. Export with `rx.export(..., to="onnx(opset=17)")`
#   or `Shrunk.save(..., opset=17)`.
