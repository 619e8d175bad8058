"""Trains SPOT's predictors of token relevance in your own model, and compares them with a random control."""

# %% [markdown]
# # SPOT with a model of your own
#
# SPOT prunes tokens with learned predictors. A predictor decides whether to keep a token, from the token's features and
# the attention of earlier layers. Predictors start with random weights, so you must train the model for some epochs.
# Use the loss of your task and the loss `keep_ratio`, which pulls the share of kept tokens towards the policy's share.
# The training changes all weights. In this example, predictors have ten times the learning rate of other weights.

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
#
# For a first look, train on few images: with `replace(splits, train=splits.train.take(768))`, an epoch of a ViT-Tiny
# takes about two minutes on two CPU cores. If labels are in another column of your file, name it in `rx.load_data(...,
# columns=rx.data.Columns(label_column="class"))`.

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
# Fine-tuning can recover accuracy even if the wrong tokens are pruned. So train a control in the same way, but with
# randomly selected tokens. If SPOT is not better than the control, its selection of tokens does not help.

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
# You can train `reducing` in your own loop, because it has the interface of the original. In training mode it samples
# masks and processes all tokens. In evaluation mode it removes tokens. Add the loss term of `KeepRatio` to your task's
# loss, as `rx.train` does.
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
# - You use `spot` without training. Its predictors are then random, so it keeps random patches.
# - You can train for only a few epochs. After one to three epochs, every trained reducer was farther from the original
#   than merging without training
#   ([measured](../results/spot.md#which-reducer-is-closest-to-the-dense-model-after-distillation)). Try `ward` first.
