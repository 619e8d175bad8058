"""Saves a smaller model as a folder, and exports it as a file that runs without attnrx, also in int8."""

# %% [markdown]
# # Deploy: folders, ONNX Runtime, int8
#
# You can save a smaller model as a folder for attnrx, or export it as a file for ONNX Runtime, OpenVINO or PyTorch. To
# run an exported file, you need neither attnrx nor the original model.

# %%
import os
from pathlib import Path

import attnrx as rx

MODEL = os.environ.get("MODEL", "")  # yours: timm:vit_tiny_patch16_224, hf:ID, a folder saved by attnrx
DATA = os.environ.get("DATA", "")  # yours: a folder of images, parquet, or a known name
OUT = Path(os.environ.get("OUT", "runs/deploy"))
OUT.mkdir(parents=True, exist_ok=True)

# %%
if MODEL:
    model = rx.load(MODEL)
    _, size, _ = rx.models.family_of(model).input_shape(model)
    splits = rx.adapt_preprocessing(rx.load_data(DATA, image_size=size), model)
else:
    from stand_in import model, splits  # a small ViT for handwritten digits, trained in seconds

diagnosis = rx.diagnose(model, splits.train.take(96))
prescription = rx.prescribe(
    diagnosis, "qk=total_rank:0.5 fc1=uniform_rank:0.5 fc2=uniform_rank:0.5 tokens=ward:0.8@2,3"
)
slim = rx.realize(model, prescription)
evidence = rx.verify(slim, model, splits.test, [rx.checks.Accuracy(), rx.checks.Costs()])

# %% [markdown]
# ## A folder
#
# `rx.save` writes a folder with the weights (safetensors), `config.json`, the prescription, the evidence and a model
# card. `rx.load` needs only this folder. `rx.push_to_hub(folder, "you/name")` publishes the folder on the Hugging Face
# Hub, and `rx.load("hub:you/name")` loads it from there.

# %%
folder = rx.save(slim, OUT / "slim", prescription=prescription, evidence=evidence)
print(", ".join(sorted(path.name for path in folder.iterdir() if ".tensors-" not in path.name)))
again = rx.load(folder)
print((folder / "README.md").read_text().splitlines()[0:6])

# %% [markdown]
# ## A file for ONNX Runtime
#
# `rx.export` runs the exported file and compares its outputs with the model's. If they differ, it does not save the
# file and raises an error. A JSON file beside the exported file contains the shape and scale of the images, the class
# names, the versions, and the measured difference.

# %%
exported = rx.export(slim, OUT / "slim.onnx")
for finding in exported.facts["parity"]:
    print(f"{finding['claim']}: within {finding['limit']:g}" if finding["limit"] is not None else finding["claim"])

# %% [markdown]
# `rx.verify` accepts an exported file in place of a model. So you can verify the file that you deploy:

# %%
fidelity = rx.verify(rx.load(OUT / "slim.onnx"), slim, splits.test, [rx.checks.Fidelity()])
agreement = fidelity.of("fidelity")[1]
print(f"{agreement.claim}: {agreement.value:.1f} {agreement.unit}")

# %% [markdown]
# Other formats are `to="program"` (torch.export), `"aotinductor"` (compiled ahead of time, also for C++) and
# `"openvino"`. The first two write a `.pt2` file. Opening a `.pt2` file can run any code that its author put there. So
# `rx.load` opens it only with `trust=True`, and a command only with `--trust`. On a CPU that computes in bfloat16,
# `"openvino(precision=bf16)"` is the fastest format and loses almost nothing ([OpenVINO](openvino_file.md)).
#
# To export in 8 bits, pass `to="int8"` for ONNX Runtime or `"openvino(precision=int8)"` for OpenVINO. NNCF then
# quantizes the model on 300 of your images. attnrx leaves a linear map in float if 8 bits would change its outputs too
# much. You need `pip install 'attnrx[int8]'`. Measure the loss in the same way:

# %%
int8 = rx.export(slim, OUT / "slim-int8.onnx", to="int8", calibration=splits.train)
change = rx.verify(int8, slim, splits.test, [rx.checks.Accuracy()]).of("accuracy")[-1]
print(f"{change.claim}: {change.value:+.1f} points [{change.low:+.1f}, {change.high:+.1f}]")

# %% [markdown]
# ## Phones and browsers
#
# In a browser, ONNX Runtime Web opens the ONNX files without changes: `ort.InferenceSession.create("slim.onnx")`. We
# tested a ViT-Tiny in WebAssembly, both unchanged and with three stages of merging. The outputs agreed with PyTorch's
# to 1.5e-6 (onnxruntime-web 1.30 in Node). We did not test WebGPU.
#
# For Core ML, convert the exported program. Models with pruned or merged tokens cannot be converted, because the
# converter does not support a stable sort. We tested the conversion on Linux (coremltools 9.0), where Core ML does not
# run:
#
# ```python
# rx.export(slim, "slim.pt2", to="program", batch=1)
# program = torch.export.load("slim.pt2").run_decompositions({})
# coremltools.convert(program, minimum_deployment_target=coremltools.target.iOS18).save("slim.mlpackage")
# ```

# %% [markdown]
# On the command line, export with `attnrx export slim --to onnx --out slim.onnx` and verify the file with `attnrx
# verify slim.onnx --reference slim --data DATA`. To measure the speed, call `rx.exporting.compare_with_original`, which
# times a file and the original's file in the same runtime. `attnrx bench MODEL --runtime onnx --methods ...` times
# several methods and the original's file in that runtime.
