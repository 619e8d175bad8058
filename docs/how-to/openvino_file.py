"""Exports a model for OpenVINO in float32, bfloat16 or int8, and compares its speed with the original's."""

# %% [markdown]
# # OpenVINO
#
# If you have an x86-64 CPU that computes in bfloat16 (AMX, AVX-512 BF16), use OpenVINO in bfloat16. On such a CPU,
# it was the fastest runtime that we measured, with almost no loss
# ([measured](../results/speed.md#what-do-bfloat16-and-int8-add)). You need `pip install 'attnrx[openvino]'`.

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
# `rx.export` writes the file, runs it, and raises an error if its outputs differ from the model's. With
# `openvino(precision=bf16)`, the file computes in bfloat16 if the CPU supports it. With `openvino(precision=int8)`,
# NNCF quantizes the model on your images, for which you need `pip install 'attnrx[int8]'`. `rx.shrink(...,
# to="openvino(precision=int8)")` also rounds numbers to 8 bits while it repairs and distills, so the fit corrects part
# of the rounding error. In your own code, pass the settings `rx.realization.repair.Repair(bits=8)` and
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
# `rx.verify` accepts the exported file in place of a model.

# %%
evidence = rx.verify(exported, model, splits.test, [rx.checks.Accuracy(), rx.checks.Fidelity()])
change = evidence.of("accuracy")[-1]
print(f"{change.claim}: {change.value:+.1f} points [{change.low:+.1f}, {change.high:+.1f}]")

# %% [markdown]
# ## Speed
#
# `compare_with_original` times the file in turns with a file of the original, in the same runtime. So the ratio shows
# only the gain by compression, and not the gain by OpenVINO.

# %%
for found in rx.exporting.compare_with_original(exported, model, threads=1, batches=(8,), rounds=5):
    print(f"a batch of {found.batch}: {found.faster.value:.2f}x the original's file")

# %% [markdown]
# One command plans for the speed of a file, writes the file and verifies it: `attnrx shrink MODEL --data DATA --faster
# 1.3 --batch 32 --threads 1 --to 'openvino(precision=bf16)' --out faster`. `--faster` is relative to the file that
# OpenVINO's own converter makes of your model.
#
# ## What can go wrong
#
# - A CPU without bfloat16 computes a bfloat16 file in float32, without a message. Compare the speeds of a bfloat16 file
#   and a float32 file.
# - OpenVINO needs both files, `.xml` and `.bin`, in the same folder.
