"""Write a model for OpenVINO, in float32, bfloat16 or int8, and time it beside the original."""

# %% [markdown]
# # OpenVINO
#
# On a CPU of x86-64 that computes in bfloat16 (AMX, AVX-512 BF16), OpenVINO in bfloat16 is the fastest way that was
# measured, and costs next to nothing ([measured](../results/speed.md#what-do-bfloat16-and-int8-add)). Needs
# `pip install 'attnrx[openvino]'`.

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
# The file is run, and refused if its outputs differ from the model's. `openvino(precision=bf16)` computes in bfloat16
# on CPUs that can. `openvino(precision=int8)` is quantized on your images by NNCF (`pip install 'attnrx[int8]'`).
# `rx.shrink(..., to="openvino(precision=int8)")` repairs and distills with the rounding in place, so that the fit
# corrects it. In your own code pass the settings `rx.realization.repair.Repair(bits=8)` and
# `rx.realization.distillation.Distill(bits=8)`.

# %%
slim = rx.realize(model, rx.prescribe(model, "tokens=ward:0.8@2"))
exported = rx.export(slim, OUT / "slim.xml", to="openvino")
for finding in exported.facts["parity"]:
    print(f"{finding['claim']}: within {finding['limit']:g}" if finding["limit"] is not None else finding["claim"])
print(", ".join(sorted(path.name for path in OUT.glob("slim*"))))

# %% [markdown]
# ## Evidence about the file
#
# Every verb takes the file in place of a model.

# %%
evidence = rx.verify(exported, model, splits.test, [rx.checks.Accuracy(), rx.checks.Fidelity()])
change = evidence.of("accuracy")[-1]
print(f"{change.claim}: {change.value:+.1f} points [{change.low:+.1f}, {change.high:+.1f}]")

# %% [markdown]
# ## Speed
#
# Beside the original in the same runtime, in turns, so that the ratio is what the compression gives.

# %%
for found in rx.exporting.compare_with_original(exported, model, threads=1, batches=(8,), rounds=5):
    print(f"a batch of {found.batch}: {found.faster.value:.2f}x the original's file")

# %% [markdown]
# One command plans for the speed of the file, writes it and verifies it: `attnrx shrink MODEL --data DATA --faster 1.3
# --batch 32 --threads 1 --to 'openvino(precision=bf16)' --out faster`. `--faster` counts from OpenVINO's own file.
#
# ## What can go wrong
#
# - A CPU without bfloat16 computes such a file in float32, without a message: compare the speeds of both.
# - The two files, `.xml` and `.bin`, belong together.
