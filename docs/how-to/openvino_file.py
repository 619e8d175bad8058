"""Write a model for OpenVINO, in float32, bfloat16 or int8, and time it beside the original."""

# %% [markdown]
# # OpenVINO
#
# Use OpenVINO in bfloat16 on an x86-64 CPU that computes in bfloat16 (AMX, AVX-512 BF16). On such a CPU it was the
# fastest way that we measured, with almost no loss ([measured](../results/speed.md#what-do-bfloat16-and-int8-add)). You
# need `pip install 'attnrx[openvino]'`.

# %%
import os
from pathlib import Path

import attnrx as rx

MODEL = os.environ.get("MODEL", "")  # yours: timm:vit_tiny_patch16_224, hf:ID, a folder saved by attnrx
DATA = os.environ.get("DATA", "")  # yours: a folder of images, parquet, or a known name
OUT = Path("runs/openvino")
OUT.mkdir(parents=True, exist_ok=True)

# %%
if MODEL:
    model = rx.load(MODEL)
    _, size, _ = rx.models.family_of(model).input_shape(model)
    splits = rx.adapt_preprocessing(rx.load_data(DATA, image_size=size), model)
else:
    from stand_in import model, splits  # a small ViT for handwritten digits, trained in seconds

# %% [markdown]
# ## Write
#
# attnrx runs the file, and refuses it if its outputs differ from the model's. `openvino(precision=bf16)` computes in
# bfloat16 if the CPU can. For `openvino(precision=int8)`, NNCF quantizes the model on your images. This needs `pip
# install 'attnrx[int8]'`. `rx.shrink(..., to="openvino(precision=int8)")` rounds the numbers while it repairs and
# distills, so the fit corrects the rounding error. In your own code, pass the settings
# `rx.realization.repair.Repair(bits=8)` and `rx.realization.distillation.Distill(bits=8)`.

# %%
slim = rx.realize(model, rx.prescribe(model, "tokens=ward:0.8@2"))
exported = rx.export(slim, OUT / "slim.xml", to="openvino")
for finding in exported.facts["parity"]:
    print(f"{finding['claim']}: within {finding['limit']:g}" if finding["limit"] is not None else finding["claim"])
print(", ".join(sorted(path.name for path in OUT.glob("slim*"))))

# %% [markdown]
# ## Evidence about the file
#
# You can pass the file to every verb in place of a model.

# %%
evidence = rx.verify(exported, model, splits.test, [rx.checks.Accuracy(), rx.checks.Fidelity()])
change = evidence.of("accuracy")[-1]
print(f"{change.claim}: {change.value:+.1f} points [{change.low:+.1f}, {change.high:+.1f}]")

# %% [markdown]
# ## Speed
#
# attnrx times the file and the original's file in turns, in the same runtime. So the ratio is the gain of the
# compression.

# %%
for found in rx.exporting.compare_with_original(exported, model, threads=1, batches=(8,), rounds=5):
    print(f"a batch of {found.batch}: {found.faster.value:.2f}x the original's file")

# %% [markdown]
# One command plans for the speed of the file, writes it and verifies it: `attnrx shrink MODEL --data DATA --faster 1.3
# --batch 32 --threads 1 --to 'openvino(precision=bf16)' --out faster`. `--faster` is relative to OpenVINO's own file.
#
# ## What can go wrong
#
# - A CPU without bfloat16 computes a bfloat16 file in float32, without a message. Compare the speeds of a bfloat16 file
#   and a float32 file.
# - Keep the two files, `.xml` and `.bin`, together.
