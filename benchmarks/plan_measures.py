"""What plans should be compared by: how well few images say which plans diverge least on many others.

    python benchmarks/plan_measures.py timm:vit_tiny_patch16_224 --data imagenette --target 0.6 --plans 24 --images 1024

Makes plans at one share of the MACs, each for other weights of the damages, and measures all on the same images. Over
random halves, told are the rank correlation between the mean of a measure over some images of one half and the mean
divergence over the other half, and by how many nats the plan that the measure finds best there is worse than the best.
"""

import argparse
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from scipy.stats import spearmanr

import attnrx as rx
from attnrx.cli.inputs import model_argument, splits_argument
from attnrx.cli.options import add_data, add_model
from attnrx.planning.allocation import Frontier
from attnrx.planning.cost_table import exact_cost_table
from attnrx.planning.plan_search import search_ranges, weights_of
from attnrx.planning.reference_outputs import Answers
from attnrx.planning.sensitivity import measure_sensitivities
from attnrx.planning.space import Choices, Space
from attnrx.tokens import parse_reducer

Measured = Mapping[str, torch.Tensor]
FOR_SENSITIVITIES, BATCH, ATTEMPTS = 96, 32, 50


def made(space: Space, answers: Answers, most: float, count: int, seed: int) -> list[Choices]:
    """Makes different plans, the closed form of even damages first."""
    cost_table = exact_cost_table(space, "macs")
    sensitivities = measure_sensitivities(space, answers.first(FOR_SENSITIVITIES), print)["softened"]
    random, found = np.random.default_rng(seed), {}
    knobs: dict[str, float] = {}
    for _ in range(ATTEMPTS * count):
        if len(found) == count:
            break
        step = Frontier(space, cost_table, sensitivities, weights_of(space, knobs)).at(most)
        found.setdefault(step.choices, step)
        knobs = {name: float(random.uniform(-span, span)) for name, span in search_ranges(space).items()}
    return list(found)


def told(measured: Measured, images: int, splits: int, seed: int) -> dict[str, tuple[float, float]]:
    """Gives, by measure, the mean rank correlation and the mean regret in nats."""
    truth, found = measured["divergence"], {}
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(truth.shape[1], generator=generator) for _ in range(splits)]
    half = truth.shape[1] // 2
    for name, own in measured.items():
        pairs = [(own[:, order[:images]].mean(1), truth[:, order[half:]].mean(1)) for order in orders]
        agree = [float(spearmanr(one, other).statistic) for one, other in pairs]
        regret = [float(other[one.argmin()] - other.min()) for one, other in pairs]
        found[name] = float(np.mean(agree)), float(np.mean(regret))
    return found


def main(given: Sequence[str] | None = None) -> None:
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
    arguments = parser.parse_args(given)
    if max(arguments.few) > arguments.images // 2:
        parser.error(f"--few {max(arguments.few)} of {arguments.images} images: the other half must be others.")
    model = model_argument(arguments.model, "cpu", arguments.weights, arguments.trust).eval()
    images = splits_argument(model, arguments).train.take(arguments.images)
    diagnosis = rx.diagnose(model, images, images=min(FOR_SENSITIVITIES, len(images)), batch_size=BATCH)
    space = Space(model, diagnosis, parse_reducer(arguments.reducer))
    answers = Answers.of(model, images, BATCH)
    rows = []
    for choices in made(space, answers, arguments.target, arguments.plans, arguments.seed):
        found = answers.measure(rx.realize(model, space.prescription(choices)))
        rows.append({"divergence": found.divergence, "softened": found.softened, "disagreement": 1 - found.agrees})
        print(f"plan {len(rows)}: {found.mean:.4f} nats, softened {found.softened.mean():.4f}", flush=True)
    measured = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    print(f"{len(rows)} plans, {len(answers)} images, {arguments.splits} splits, torch {torch.__version__}")
    for count in arguments.few:
        for name, (agree, regret) in told(measured, count, arguments.splits, arguments.seed).items():
            print(f"{count:5d} images  {name:14s} rank correlation {agree:.3f}  regret {regret:.4f} nats")


if __name__ == "__main__":
    main()
