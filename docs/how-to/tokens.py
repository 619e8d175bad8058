"""Prunes and merges tokens without training (ToMe, EViT)."""

# %% [markdown]
# # Prune or merge tokens
#
# Most of a ViT's arithmetic is proportional to the number of patches, so removing patches makes the model faster. You
# write a *policy*, which contains the name of a token reducer, the layers before which it runs, and the share of
# patches that it keeps. You need no diagnosis.

# %%
import os

import attnrx as rx

MODEL = os.environ.get("MODEL", "")  # yours: timm:vit_tiny_patch16_224, hf:ID, a folder saved by attnrx
DATA = os.environ.get("DATA", "")  # yours: a folder of images, parquet, or a known name
LAYERS = os.environ.get("LAYERS", "2,3")  # with twelve layers, take 4,7,10

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
# The next cell compares three reducers. `tome` (ToMe) merges the patches with the most similar keys. `evit` (EViT)
# keeps the patches to which the class token attends most, and fuses the rest into one token. `random` is a control that
# both must beat. With a ratio of 0.7, every stage keeps 70 % of the remaining patches. So the number of tokens in every
# layer, and the cost of the model, are known in advance.

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
# The next cell prints how much the accuracy changes on the same images, with 95 % intervals:

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
# ## The same on the command line
#
# ```bash
# attnrx prescribe timm:vit_tiny_patch16_224 --rules tokens=tome:13@every --out tome.json
# attnrx realize timm:vit_tiny_patch16_224 --prescription tome.json --out tome
# attnrx costs timm:vit_tiny_patch16_224 --tokens tome:13@every
# ```
#
# To train a reducer that learns which patches to keep, see [SPOT](spot.md). To write your own reducer, you need [ten
# lines](new_reducer.md). The [reference](../api/tokens.md) lists all reducers. The [results](../results/spot.md)
# contain measurements on a pre-trained ViT-Tiny.
