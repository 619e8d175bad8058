"""Adds a token reducer, a class of ten lines that works in rules, files, plans and training like built-in reducers."""

# %% [markdown]
# # Add a reducer
#
# A token reducer decides which patches the next layers process. To write a reducer that scores patches and keeps the
# best ones, you need a class of a few lines. It then works in rules, saved models, checks, plans and exported files.

# %%
from dataclasses import dataclass

import torch
from stand_in import model, splits  # a small ViT for handwritten digits, trained in seconds

import attnrx as rx

# %% [markdown]
# ## The class
#
# Subclass `Selecting`, which keeps the patches with the highest `relevance` [batch, patches]. The fields of your class
# become options in policy texts. The example keeps the patches whose features have the largest norm, and its field
# `order` chooses the norm. The argument `state` always has these fields:
#
# | field | shape | is |
# |---|---|---|
# | `tokens` | [batch, tokens, width] | all tokens (the first `prefix` are not patches) |
# | `patches` | [batch, patches, width] | the tokens that are patches |
# | `sizes` | [batch, tokens] | how many patches of the image a token represents, or 0 if it is masked |
# | `patch_indices` | [batch, patches] | the position of every patch in the image |
# | `stage`, `layer`, `depth` | numbers | the position of the stage in the model |
#
# If you list them in `needs`, e.g. `needs = ("keys",)`, `state` also contains these results of the previous layer:
#
# | value of `needs` | shape |
# |---|---|
# | `class_attention` | [batch, heads, tokens], from the class token |
# | `attention` | [batch, heads, tokens, tokens] |
# | `keys` | [batch, tokens, directions], averaged over the heads |
# | `value_norms` | [batch, heads, tokens] |


# %%
@dataclass(frozen=True)
class LargestFeatures(rx.tokens.Selecting):
    """Keeps the patches with the largest norm of their features."""

    order: float = 2.0

    def relevance(self, state, predictor):
        return state.patches.norm(self.order, dim=-1)


rx.tokens.REDUCERS.register(LargestFeatures)  # its name in texts: largest_features

# %% [markdown]
# ## Use it
#
# After registration, you can use the reducer by its name. The loop compares it with a control that keeps random
# patches:

# %%
checks = [rx.checks.Fidelity()]
for name in ("largest_features(order=1)", "random"):
    small = rx.realize(model, rx.prescribe(model, f"tokens={name}:0.7@2,3"))
    discrepancy = rx.verify(small, model, splits.test, checks).of("fidelity")[0]
    print(f"{name}: {discrepancy.claim} {discrepancy.value:.3f}")

# %% [markdown]
# ## Save and load
#
# A saved model contains the text of its token policy, but not the code of your reducer. So register the class before
# you load the model.

# %%
small = rx.realize(model, rx.prescribe(model, "tokens=largest_features:0.7@2,3"))
again = rx.load(rx.save(small, "runs/largest"))
images = next(iter(splits.test.batches(8))).images
with torch.no_grad():
    print(f"bit for bit: {torch.equal(again(images), small(images))}")

# %% [markdown]
# ## On the command line
#
# Put the class into a file, and pass the file to any command: `attnrx compare ... --plugin largest_features.py`. You
# need no option if your reducer is in an installed package that lists its modules as entry points in the group
# `attnrx.parts`.
#
# ## In the package
#
# To contribute a reducer to attnrx, put the class in `src/attnrx/vit/tokens/`. You also need one line in `REDUCERS`,
# one export, and one line in `tests/support/cases.py`. The tests in `tests/laws/` then check what every reducer must
# guarantee: mask and removal have equal outputs, costs equal counted operations, the images of a batch do not affect
# each other, and exported files have the same outputs ([Architecture](../architecture.md)).
#
# If your reducer merges tokens, implement `Reducer.reduce` (see `Ward`). If it learns its scores, subclass
# `attnrx_lab.tokens.Predicting` (see `Spot` in the same package).
