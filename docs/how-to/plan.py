"""Plan for a target: one budget over ranks and tokens, with promises that are held to account."""

# %% [markdown]
# # Plan for a target
#
# A rank or a keep ratio is not what one wants; a time, a number of MACs or an accuracy is. `plan` shares one budget out
# over the ranks of scores, values and MLP, and over the tokens, layer by layer.

# %%
import os

import attnrx as rx

MODEL = os.environ.get("MODEL", "")  # yours: timm:vit_tiny_patch16_224, hf:ID, a folder saved by attnrx
DATA = os.environ.get("DATA", "")  # yours: a folder of images, parquet, WebDataset shards, or a known name
TARGET = os.environ.get("TARGET", "macs=0.6x")  # or latency=0.6x, params=0.8x, max-drop=1pt

# %%
if MODEL:
    model = rx.load(MODEL)
    _, size, _ = rx.models.family_of(model).input_shape(model)
    splits = rx.adapt_preprocessing(rx.load_data(DATA, image_size=size), model)
else:
    from stand_in import model, splits  # a small ViT for handwritten digits, trained in seconds

# %% [markdown]
# What each choice costs comes from tables: closed form for MACs and parameters, and for latency the clock of this
# machine. What each does to the answers is measured, one layer at a time, on images without labels. The closed form
# is then the best of all plans, if damages add up (dynamic programming over the layers); because they do not quite, a
# search (Optuna) weighs the kinds of damage against each other by whole plans, and then varies the best plan a few
# layers at a time. It goes by the answers softened, which few images tell well; the best few plans are compared on all
# images. The more trials, the better the plan.

# %%
images, others = splits.train.take(96), splits.validation.take(128)
diagnosis = rx.diagnose(model, images)
ways = rx.planning.Ways(search=rx.planning.Search(trials=6))
plan = rx.plan(model, diagnosis, TARGET, images, others, ways=ways)
slim = rx.realize(model, plan.promising)
family = rx.models.family_of(model)
for number, (own, before) in enumerate(zip(family.costs(slim).layers, family.costs(model).layers, strict=True), 1):
    print(f"layer {number}: {own.tokens} tokens, {100 * own.total.macs / before.total.macs:.0f} % of its MACs")

# %% [markdown]
# `plan.explained` has one line for every choice: what it saves, and what it alone does to the answers.
#
# Beside the plan there is its front, from the original towards the target: share of the cost, and divergence of the
# answers in nats, predicted by adding up and measured.

# %%
point = plan.front[-1]
print(f"{point.price:.3f} of the {plan.spend}: {point.damage:.2g} nats predicted, {point.divergence:.2g} measured")

# %% [markdown]
# A plan promises what it found on images that nothing was chosen by. The check `promises` holds it to account: on
# other images the means must be no worse than the interval that the plan gives for so many, and for a target of
# latency the clock must say what it said.

# %%
checks = [rx.checks.Promises(), rx.checks.Accuracy()]
evidence = rx.verify(slim, model, splits.test, checks, prescription=plan.promising)
for finding in evidence.of("promises"):
    promised = finding.details["promised"]
    print(f"{finding.claim}: {finding.value:.3g} {finding.unit}, promised {promised:.3g}, limit {finding.limit:.3g}")

# %% [markdown]
# On the command line, with files: `attnrx plan MODEL --target latency=0.6x --data DATA --out plan`, then
# `attnrx realize MODEL --prescription plan/prescription.json --out slim` and
# `attnrx verify slim --reference MODEL --data DATA --checks promises`. With `--storage trials.db` a search that was
# stopped goes on, and several machines search together.
