"""What budgets between the stored sizes of an elastic model cost, beside plans of their own.

Every stored size but the largest and the smallest is left out in turn, and its budget is loaded from the others; the
divergence on the test images is compared with that of the size itself, on the same images. Then the time to load.

python benchmarks/elastic.py runs/elastic --data DATA     # made by `attnrx elastic MODEL --macs 0.8,0.72,0.65 ...`
"""

import argparse
import time
from dataclasses import replace

import numpy as np
import torch
from torch import nn

import attnrx as rx
from attnrx.change.realization.elastic import ORIGINAL, Elastic
from attnrx.cli.inputs import splits_argument
from attnrx.cli.options import add_data
from attnrx.vit.models import family_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    add_data(parser, "whose test images are used")
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--keep", nargs="*", default=None, help="names of the sizes that stay, for all others at once")
    arguments = parser.parse_args()
    elastic_model = Elastic.read(arguments.folder)
    original = rx.load(elastic_model.folder / ORIGINAL).eval()
    splits = splits_argument(original, arguments)
    images = torch.cat([batch.images for batch in splits.test.take(arguments.images).batches(50)])
    reference = log_probabilities(original, images)
    whole = family_of(original).costs(original).macs
    stored = [size for size in elastic_model.sizes if size.name != ORIGINAL]
    print(f"{len(images)} images, torch {torch.__version__}")
    print("| budget | own plan: MACs, KL | from the other sizes: MACs, KL | KL relative to the own plan |")
    print("|---|---|---|---|")
    # Nothing is stored below the smallest size, whose budget the others may not reach.
    for size in stored[1:-1] if arguments.keep is None else stored:
        stored_model = rx.load(elastic_model.folder / size.name)
        if arguments.keep is None:
            others = tuple(each for each in elastic_model.sizes if each.name != size.name)
        else:
            others = tuple(each for each in elastic_model.sizes if each.name in (ORIGINAL, *arguments.keep))
        cells = []
        divergences = []
        for model in (stored_model, replace(elastic_model, sizes=others).load("macs", size.macs)):
            divergence = (reference.exp() * (reference - log_probabilities(model, images))).sum(-1).numpy()
            divergences.append(divergence)
            share = 100 * family_of(model).costs(model).macs / whole
            cells.append(
                f"{share:.1f} %, {divergence.mean():.4f} [{', '.join(f'{end:.4f}' for end in interval(divergence))}]"
            )
        ratio = divergences[1].mean() / divergences[0].mean()
        # Paired: both means are over the same images in every resample.
        draws = np.random.default_rng(0).integers(0, len(images), (2000, len(images)))
        low, high = np.quantile(divergences[1][draws].mean(1) / divergences[0][draws].mean(1), [0.025, 0.975])
        print(f"| {size.name} | {cells[0]} | {cells[1]} | {ratio:.2f} [{low:.2f}, {high:.2f}] |", flush=True)
    # From the smallest size to nearly the original: a budget of 1 would load the original itself.
    seconds = []
    for most in np.linspace(stored[-1].macs, 0.95, 20):
        started = time.perf_counter()
        rx.load(elastic_model.folder, macs=float(most))
        seconds.append(time.perf_counter() - started)
    print(f"loading a budget: median {np.median(seconds):.2f} s, most {max(seconds):.2f} s (20 budgets)")


def log_probabilities(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        # float64: the divergence of nearly equal models is a small difference of logarithms.
        return torch.cat([model(part) for part in images.split(50)]).double().log_softmax(-1)


def interval(values: np.ndarray) -> tuple[float, float]:
    draws = np.random.default_rng(0).integers(0, len(values), (2000, len(values)))
    low, high = np.quantile(values[draws].mean(1), [0.025, 0.975])
    return float(low), float(high)


if __name__ == "__main__":
    main()
