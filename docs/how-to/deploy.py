"""Deploy: a folder that loads anywhere, a file that runs without attnrx, and int8."""

# %% [markdown]
# # Deploy: folders, ONNX Runtime, int8
#
# Save a smaller model as a folder that loads anywhere, or export a file for ONNX Runtime, OpenVINO or PyTorch. The
# exported file needs neither attnrx nor the original.

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
# `save` writes the weights (safetensors), `config.json`, the prescription, the evidence and a model card for a hub.
# `load` needs only the folder. `rx.push_to_hub(folder, "you/name")` publishes it, and `rx.load("hub:you/name")` loads
# it.

# %%
folder = rx.save(slim, OUT / "slim", prescription=prescription, evidence=evidence)
print(", ".join(sorted(path.name for path in folder.iterdir() if ".tensors-" not in path.name)))
again = rx.load(folder)
print((folder / "README.md").read_text().splitlines()[0:6])

# %% [markdown]
# ## A file for ONNX Runtime
#
# attnrx runs the exported file and compares it with the model before it saves the file. If the outputs differ, it
# refuses the file. A JSON file next to it contains the images' shape and scale, the class names, the versions, and the
# difference between file and model.

# %%
exported = rx.export(slim, OUT / "slim.onnx")
for finding in exported.facts["parity"]:
    print(f"{finding['claim']}: within {finding['limit']:g}" if finding["limit"] is not None else finding["claim"])

# %% [markdown]
# You can pass the file to every verb in place of a model. So you can verify the file that you deploy:

# %%
fidelity = rx.verify(rx.load(OUT / "slim.onnx"), slim, splits.test, [rx.checks.Fidelity()])
agreement = fidelity.of("fidelity")[1]
print(f"{agreement.claim}: {agreement.value:.1f} {agreement.unit}")

# %% [markdown]
# In the same way, export to `to="program"` (torch.export), `"aotinductor"` (compiled ahead of time, also for C++) or
# `"openvino"`. The first two write a `.pt2` file. Opening such a file can run any code that its author put there. So
# `rx.load` opens it only with `trust=True`, and a command only with `--trust`. On a CPU that computes in bfloat16,
# `"openvino(precision=bf16)"` is the fastest, with almost no loss ([OpenVINO](openvino_file.md)).
#
# For `int8`, NNCF quantizes the model on 300 of your images (`"openvino(precision=int8)"` for OpenVINO). You need `pip
# install 'attnrx[int8]'`. Measure the loss in the same way:

# %%
int8 = rx.export(slim, OUT / "slim-int8.onnx", to="int8", calibration=splits.train)
change = rx.verify(int8, slim, splits.test, [rx.checks.Accuracy()]).of("accuracy")[-1]
print(f"{change.claim}: {change.value:+.1f} points [{change.low:+.1f}, {change.high:+.1f}]")

# %% [markdown]
# ## Phones and browsers
#
# ONNX Runtime Web runs the ONNX files without changes: `ort.InferenceSession.create("slim.onnx")`. We tried a ViT-Tiny
# in WebAssembly, both unchanged and with three stages of merging. The outputs agreed with PyTorch's to 1.5e-6
# (onnxruntime-web 1.30 in Node). WebGPU was not tried.
#
# For Core ML, convert the program. You can convert only models without pruned or merged tokens, because the converter
# has no stable sort. We checked the conversion on Linux (coremltools 9.0), where Core ML does not run:
#
# ```python
# rx.export(slim, "slim.pt2", to="program", batch=1)
# program = torch.export.load("slim.pt2").run_decompositions({})
# coremltools.convert(program, minimum_deployment_target=coremltools.target.iOS18).save("slim.mlpackage")
# ```

# %% [markdown]
# On the command line, use `attnrx export slim --to onnx --out slim.onnx`, then `attnrx verify slim.onnx --reference
# slim --data DATA`. In Python, `rx.exporting.compare_with_original` times a file beside the original's file in the same
# runtime. `attnrx bench MODEL --runtime onnx --methods ...` times all methods in that runtime, and also the original's
# file.
