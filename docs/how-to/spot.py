"""Train SPOT on a model of your own: predictors of token relevance, and the control that they must beat."""

# %% [markdown]
# # SPOT with a model of your own
#
# SPOT predicts from a token and from the attention of earlier layers whether to keep the token. Its predictors start at
# random. So train them for some epochs, with the loss of the task and with `keep_ratio`. `keep_ratio` pulls the shares
# of the sampled masks to the policy's shares. The training changes the whole model. The predictors have ten times the
# learning rate.

# %%
import os
from dataclasses import replace

import attnrx as rx
from attnrx_lab.tokens import KeepRatio

MODEL = os.environ.get("MODEL", "")  # yours: timm:deit_small_patch16_224, hf:ID, a folder saved by attnrx
DATA = os.environ.get("DATA", "")  # yours: a folder of images, parquet, or a known name
LAYERS = os.environ.get("LAYERS", "2,3")  # with twelve layers, take 4,7,10

# %%
if MODEL:
    model = rx.load(MODEL)  # or an instance of yours, rx.load(model)
    _, size, _ = rx.models.family_of(model).input_shape(model)
    splits = rx.adapt_preprocessing(rx.load_data(DATA, image_size=size), model)
else:
    from stand_in import model, splits  # a small ViT for handwritten digits, trained in seconds

# %% [markdown]
# ## Train

# %%
prescription = rx.prescribe(model, f"tokens=spot:0.7@{LAYERS}")
reducing = rx.realize(model, prescription)
config = rx.TrainingConfig(
    epochs=2,
    batch_size=32,
    learning_rate=5e-4,
    weight_decay=0.0,
    losses=(rx.losses.Task(0.0), KeepRatio(2.0)),
    predictor_learning_rate=10.0,
    augmentation=rx.data.Augmentation(padding=0, flip=False),  # leave out for photographs
    precision="fp32",  # bf16 on a GPU
)
run = rx.train(reducing, splits, config, "runs/spot")
for epoch in run.history:
    print(f"epoch {epoch['epoch']}: loss {epoch['loss']:.3f}")

# %% [markdown]
# ## The control
#
# The control is the same training with random tokens. If SPOT does not beat it, the gain comes from the fine-tuning.

# %%
random = rx.realize(model, rx.prescribe(model, f"tokens=random:0.7@{LAYERS}"))
plain = replace(config, losses=(rx.losses.Task(0.0),))
control = rx.train(random, splits, plain, "runs/random")
checks = [rx.checks.Accuracy()]
for name, trained in {"spot": run.model, "random": control.model}.items():
    evidence = rx.verify(trained, model, splits.test, checks)
    *_, change = evidence.of("accuracy")
    print(f"{name}, fine-tuned: {change.value:+.1f} points [{change.low:+.1f}, {change.high:+.1f}]")

# %% [markdown]
# ## A loop of your own
#
# `reducing` is a module with the interface of the original, so any loop can train it. In training mode it samples masks
# and processes all tokens. In evaluation mode it removes tokens. Add the term of `KeepRatio` to your task's loss.
# `rx.train` computes both.
#
# ## On the command line
#
# ```bash
# attnrx train timm:deit_small_patch16_224 --tokens spot:0.7@4,7,10 --data path/to/images \
#     --losses keep_ratio --out runs/spot
# attnrx verify runs/spot --reference timm:deit_small_patch16_224 --data path/to/images
# ```
#
# ## What can go wrong
#
# - Without training, the predictors of `spot` are random, and so `spot` keeps random patches.
# - After one to three epochs, merging without training was closer to the original than every trained reducer
#   ([measured](../results/spot.md#which-reducer-is-closest-to-the-dense-model-after-distillation)). Try `ward` first.
