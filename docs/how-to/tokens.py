"""Prune tokens: without training (ToMe, EViT), and with a learned reducer and a short fine-tuning (SPOT)."""

# %% [markdown]
# # Prune tokens
#
# Most of a ViT's arithmetic is proportional to the number of patches. A *policy* names a token reducer, the layers
# before which it runs, and the kept share. It needs no diagnosis.

# %%
import os
from dataclasses import replace

import attnrx as rx

MODEL = os.environ.get("MODEL", "")  # yours: timm:vit_tiny_patch16_224, hf:ID, a folder saved by attnrx
DATA = os.environ.get("DATA", "")  # yours: a folder of images, parquet, WebDataset shards, or a known name
LAYERS = os.environ.get("LAYERS", "2,3")  # of twelve layers one would take 4,7,10

# %%
if MODEL:
    model = rx.load(MODEL)
    _, size, _ = rx.models.family_of(model).input_shape(model)
    splits = rx.adapt_preprocessing(rx.load_data(DATA, image_size=size), model)
else:
    from stand_in import model, splits  # a small ViT for handwritten digits, trained in seconds

# %% [markdown]
# ## Without training
#
# ToMe merges the patches with the most similar keys; EViT keeps the patches with the highest class attention and fuses
# the rest into one token; `random` is the control that both must beat. A keep ratio of 0.7 is the share of the
# remaining patches at every stage. The costs are known before `realize`: every layer has its own number of tokens.

# %%
before = rx.models.family_of(model).costs(model)
slims = {}
for name in ("random", "tome", "evit"):
    prescription = rx.prescribe(model, f"tokens={name}:0.7@{LAYERS}")
    slims[name] = rx.realize(model, prescription)
    after = rx.models.family_of(slims[name]).costs(slims[name])
    print(f"{name}: {100 * after.macs / before.macs:.1f} % of the MACs")
print("; ".join(prescription.tokens.reasons))

# %% [markdown]
# The change of accuracy, paired on the same images, with 95 % intervals:

# %%
checks = [rx.checks.Accuracy(), rx.checks.Fidelity()]
for name, slim in slims.items():
    evidence = rx.verify(slim, model, splits.test, checks)
    *_, change = evidence.of("accuracy")
    agreement = evidence.of("fidelity")[1]
    print(
        f"{name}: {change.value:+.1f} points [{change.low:+.1f}, {change.high:+.1f}], agreement {agreement.value:.1f} %"
    )

# %% [markdown]
# Tokens and ranks go together: `rx.prescribe(diagnosis, "qk=total_rank:0.5 tokens=evit:0.7@4,7,10")` is one
# prescription, realized in one call.
#
# ## With a learned reducer
#
# SPOT predicts from a token and from the attention of the previous layers whether to keep it. Its predictors are
# initialized at random, so they must be trained: for some epochs, with the task and with `keep_ratio`, which pulls
# their sampled masks to the policy's shares. The whole model is trained, the predictors at ten times the rate.

# %%
prescription = rx.prescribe(model, f"tokens=spot:0.7@{LAYERS}")
reducing = rx.realize(model, prescription)
config = rx.TrainingConfig(
    epochs=2,
    batch_size=32,
    learning_rate=5e-4,
    weight_decay=0.0,
    losses=(rx.losses.Task(0.0), rx.losses.KeepRatio(2.0)),
    predictor_learning_rate=10.0,
    augmentation=rx.data.Augmentation(padding=0, flip=False),  # leave out for photographs
    precision="fp32",  # bf16 on a GPU
)
run = rx.train(reducing, splits, config, "runs/spot", reporter=rx.training.Silent())
for epoch in run.history:
    print(f"epoch {epoch['epoch']}: loss {epoch['loss']:.3f}")

# %% [markdown]
# The control is the same training with random tokens. If SPOT does not beat it, the gain is due to the fine-tuning.

# %%
random = rx.realize(model, rx.prescribe(model, f"tokens=random:0.7@{LAYERS}"))
plain = replace(config, losses=(rx.losses.Task(0.0),))
control = rx.train(random, splits, plain, "runs/random", reporter=rx.training.Silent())
for name, trained in {"spot": run.model, "random": control.model}.items():
    evidence = rx.verify(trained, model, splits.test, checks)
    *_, change = evidence.of("accuracy")
    print(f"{name}, fine-tuned: {change.value:+.1f} points [{change.low:+.1f}, {change.high:+.1f}]")

# %% [markdown]
# ## The same on the command line
#
# ```bash
# attnrx prescribe timm:vit_tiny_patch16_224 --rules tokens=tome:13@every --out tome.json
# attnrx realize timm:vit_tiny_patch16_224 --prescription tome.json --out tome
# attnrx train timm:vit_tiny_patch16_224 --tokens spot:0.7@4,7,10 --data path/to/images \
#     --losses keep_ratio --out runs/spot
# attnrx costs timm:vit_tiny_patch16_224 --tokens spot:0.7@4,7,10
# ```
#
# All reducers are in the [reference](../api/tokens.md), and measurements on a real ViT-Tiny in the
# [results](../results/spot.md).
