"""Plans ranks and tokens for a target, and verifies the plan's predictions."""

# %% [markdown]
# # Plan for a target
#
# You need not choose ranks and keep ratios yourself. Give `rx.plan` a latency, a number of MACs or a limit on the loss.
# It divides this budget among the ranks of scores, values and MLPs, and the tokens, layer by layer.

# %%
import os

import attnrx as rx

MODEL = os.environ.get("MODEL", "")  # yours: timm:vit_tiny_patch16_224, hf:ID, a folder saved by attnrx
DATA = os.environ.get("DATA", "")  # yours: a folder of images, parquet, or a known name
TARGET = os.environ.get("TARGET", "macs=0.6x")  # or latency=0.6x, params=0.8x, size=4MB, max-kl=0.05

# %%
if MODEL:
    model = rx.load(MODEL)
    _, size, _ = rx.models.family_of(model).input_shape(model)
    splits = rx.adapt_preprocessing(rx.load_data(DATA, image_size=size), model)
else:
    from stand_in import model, splits  # a small ViT for handwritten digits, trained in seconds

# %% [markdown]
# `rx.plan` compares the cost and the effect of each choice. Costs come from a table: MACs and parameters are computed
# by formulas, and latency is measured on your machine. The sensitivity of a choice is its effect on the outputs,
# measured one layer at a time, without labels.
#
# If sensitivities added up, dynamic programming over the layers would find the best plan. Because they only
# approximately add up, a search tries whole plans, and then varies the best plan a few layers at a time. The search
# first compares softened outputs, which need few images. Then it compares the best few plans on all images. More trials
# find better plans.

# %%
images, others = splits.train.take(96), splits.validation.take(128)
diagnosis = rx.diagnose(model, images)
settings = rx.planning.PlanSettings(trials=6)
plan = rx.plan(model, diagnosis, TARGET, images, others, settings=settings)
slim = rx.realize(model, plan.with_predictions)
family = rx.models.family_of(model)
for number, (own, before) in enumerate(zip(family.costs(slim).layers, family.costs(model).layers, strict=True), 1):
    print(f"layer {number}: {own.tokens} tokens, {100 * own.total.macs / before.total.macs:.0f} % of its MACs")

# %% [markdown]
# `plan.explained` contains one line for every choice, with the cost that it saves and its effect on the outputs.
#
# A plan predicts latency and quality from images that were not used to choose it. The check `Promises` verifies these
# predictions on other images. No mean may be worse than the predicted interval, and the check measures a latency target
# again. A claim holds only if there are enough images to exclude twice the promised loss. With fewer images, the claim
# is undecided.

# %%
checks = [rx.checks.Promises(), rx.checks.Accuracy()]
evidence = rx.verify(slim, model, splits.test, checks, prescription=plan.with_predictions)
for finding in evidence.of("promises"):
    promised = finding.details["promised"]
    print(f"{finding.claim}: {finding.value:.3g} {finding.unit}, promised {promised:.3g}, limit {finding.limit:.3g}")

# %% [markdown]
# On the command line, `attnrx shrink MODEL --faster 1.6 --data DATA --out slim` runs all steps of this page. If you
# call `plan.save("plan")` in Python, you can continue with `attnrx realize MODEL --prescription plan/prescription.json
# --out slim` and `attnrx verify slim --reference MODEL --data DATA --checks promises`.
