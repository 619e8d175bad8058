"""By which measure plans should be compared: how well it ranks them by their divergence on many other images.

    python benchmarks/plan_measures.py timm:vit_tiny_patch16_224 --data imagenette --target 0.6 --plans 24 --images 1024

Makes plans at one share of the MACs, each for other weights of the sensitivities, and measures all on the same images.
For random halves of the images it prints the rank correlation between the mean of a measure over some images of one
half and the mean divergence over the other half, and the regret: by how many nats the plan that is best by the measure
is worse than the best.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from scipy.stats import spearmanr

import attnrx as rx
from attnrx.cli.options import add_data, add_model, model_argument, splits_argument
from attnrx.decide.planning.allocation import Frontier
from attnrx.decide.planning.cost_table import exact_cost_table
from attnrx.decide.planning.sensitivity import Answers, measure_sensitivities
from attnrx.decide.planning.space import Choices, Space
from attnrx.nouns.effort import PlanSettings
from attnrx.vit.tokens import parse_reducer

Measured = Mapping[str, torch.Tensor]
FOR_SENSITIVITIES, BATCH = 96, 32  # images
SPAN = 1.5  # of the weights of an axis, in powers of two
ATTEMPTS = 50  # draws of weights for every plan that is requested


def make_plans(space: Space, answers: Answers, most: float, count: int, seed: int) -> list[Choices]:
    """Makes different plans, each optimal for sensitivities that are multiplied by other weights; the first by 1."""
    cost_table = exact_cost_table(space, "macs")
    sensitivities = measure_sensitivities(space, answers.first(FOR_SENSITIVITIES), PlanSettings(log=print))
    random, plans = np.random.default_rng(seed), {}
    weights = dict.fromkeys(space.axes, 1.0)
    # Different weights may lead to the same plan.
    for _ in range(ATTEMPTS * count):
        if len(plans) == count:
            break
        ranks = {axis: weights.get(axis, 1.0) * table for axis, table in sensitivities.ranks.items()}
        weighted = replace(sensitivities, ranks=ranks, _known={})
        step = Frontier(space, cost_table, weighted).at(most)
        plans.setdefault(step.choices, step)
        weights = {axis: 2.0 ** float(random.uniform(-SPAN, SPAN)) for axis in space.axes}
    return list(plans)


def plan_quality(measured: Measured, images: int, splits: int, seed: int) -> dict[str, tuple[float, float]]:
    """Returns the mean rank correlation and the mean regret in nats, by measure."""
    divergence, quality = measured["divergence"], {}
    generator = torch.Generator().manual_seed(seed)
    # Disjoint halves: a plan that is best by chance on its own images has no advantage on the others.
    orders = [torch.randperm(divergence.shape[1], generator=generator) for _ in range(splits)]
    half = divergence.shape[1] // 2
    for name, values in measured.items():
        pairs = [(values[:, order[:images]].mean(1), divergence[:, order[half:]].mean(1)) for order in orders]
        correlations = [float(spearmanr(means, divergences).statistic) for means, divergences in pairs]
        regrets = [float(divergences[means.argmin()] - divergences.min()) for means, divergences in pairs]
        quality[name] = float(np.mean(correlations)), float(np.mean(regrets))
    return quality


def main(words: Sequence[str] | None = None) -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    add_data(parser, "whose training images are used")
    parser.add_argument("--reducer", default="ward")
    parser.add_argument("--target", type=float, default=0.6, help="share of the MACs")
    parser.add_argument("--plans", type=int, default=24)
    parser.add_argument("--images", type=int, default=1024)
    parser.add_argument("--few", type=int, nargs="+", default=[96, 256], help="at most half of the images")
    parser.add_argument("--splits", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(words)
    if max(arguments.few) > arguments.images // 2:
        # Only the first half of an order is measured by.
        parser.error(f"--few {max(arguments.few)} of {arguments.images} images: the other half must be others.")
    model = model_argument(arguments.model, "cpu", arguments.weights, arguments.trust).eval()
    images = splits_argument(model, arguments).train.take(arguments.images)
    diagnosis = rx.diagnose(model, images, images=min(FOR_SENSITIVITIES, len(images)), batch_size=BATCH)
    space = Space(model, diagnosis, parse_reducer(arguments.reducer))
    answers = Answers.of(model, images, BATCH)
    rows = []
    for choices in make_plans(space, answers, arguments.target, arguments.plans, arguments.seed):
        deviation = answers.measure(rx.realize(model, space.prescription(choices)))
        rows.append(
            {"divergence": deviation.divergence, "softened": deviation.softened, "disagreement": 1 - deviation.agrees}
        )
        print(f"plan {len(rows)}: {deviation.mean:.4f} nats, softened {deviation.softened.mean():.4f}", flush=True)
    measured = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    print(f"{len(rows)} plans, {len(answers)} images, {arguments.splits} splits, torch {torch.__version__}")
    for count in arguments.few:
        for name, (correlation, regret) in plan_quality(measured, count, arguments.splits, arguments.seed).items():
            print(f"{count:5d} images  {name:14s} rank correlation {correlation:.3f}  regret {regret:.4f} nats")


if __name__ == "__main__":
    main()
