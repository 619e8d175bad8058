"""Divergence on classes that the calibration images have and on others: what each map owes to its calibration images.

The classes are divided into halves. Every prescription is calibrated on images of one half, and on images of the other,
and both models are measured on the test images of all classes: every image is once of a class of the calibration and
once of another, so that harder classes do not count as a shift.

python benchmarks/shift.py MODEL --weights FILE --data DATA --rules 'hidden=uniform_rank:0.75' 'qk=total_rank:0.5'
"""

import argparse

import numpy as np
import torch
from torch import nn

import attnrx as rx
from attnrx.change.realization import realize_and_fit
from attnrx.change.realization.repair import Repair
from attnrx.cli.options import add_data, add_model, model_argument, splits_argument
from attnrx.data import ImageSet
from attnrx.data.images import UNLABELLED

TILES = 2  # of an image of other data per side: 64 pixels on 224 are blurred as one image, and photographs are not


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    add_data(parser, "training images for calibration, test images for the measurement")
    parser.add_argument("--others", help="data of other classes, of which 2 x 2 small images are one for calibration")
    parser.add_argument("--times", type=int, default=1, help="images of --others per image of --data")
    parser.add_argument(
        "--rules", nargs="+", required=True, help="rules of `attnrx prescribe`; ' repair=STEPS' repairs"
    )
    parser.add_argument("--calibration-images", type=int, default=512)
    parser.add_argument("--images", type=int, default=500)
    arguments = parser.parse_args()
    original = model_argument(arguments.model, "cpu", arguments.weights, arguments.trust).eval()
    splits = splits_argument(original, arguments)
    tested, test_labels = stacked(splits.test.take(min(arguments.images, len(splits.test))))
    # Twice as many, of which each half of the classes has about half.
    train, mosaics, times = splits.train, None, arguments.times
    if arguments.others is not None:  # some of them follow each image of a half of the classes
        mosaics = tiled(arguments.others, splits, times * arguments.calibration_images)
    pool, labels = stacked(train.take(min(2 * arguments.calibration_images, len(train))))
    # Of the classes with test images; a head may distinguish many more.
    classes = torch.tensor(sorted(set(test_labels.tolist())))
    first = classes[: len(classes) // 2]
    print(f"{len(tested)} images, halves {first.tolist()} and the others; torch {torch.__version__}")
    print("| prescription | KL, classes of the calibration | KL, other classes | other / own |")
    print("|---|---|---|---|")
    reference = outputs(original, tested)
    for text in arguments.rules:
        rules, _, steps = text.partition(" repair=")
        # Filled half by half: every image gets both numbers from two models.
        own, others = np.empty(len(tested)), np.empty(len(tested))
        for of_half in (True, False):
            in_half = torch.isin(labels, first) == of_half
            images = pairs(pool[in_half][: arguments.calibration_images], labels[in_half], mosaics, times)
            model = compressed(original, rules, images, int(steps or 0))
            divergence = divergences(reference, outputs(model, tested))
            is_own = torch.isin(test_labels, first) == of_half
            own[is_own], others[~is_own] = divergence[is_own], divergence[~is_own]
        print(f"| `{text}` | {row(own, others)} |", flush=True)


def stacked(images: ImageSet) -> tuple[torch.Tensor, torch.Tensor]:
    batches = list(images.batches(64))
    return torch.cat([batch.images for batch in batches]), torch.cat([batch.labels for batch in batches])


def tiled(others: str, splits: rx.data.Splits, count: int) -> torch.Tensor:
    """Returns images of other data in the normalization and size of the splits, each of TILES x TILES images."""
    assert isinstance(splits.image_size, int)
    loaded = rx.load_data(others, image_size=-(-splits.image_size // TILES)).train
    images, _ = stacked(loaded.renormalized(splits.normalization).take(count * TILES**2))
    # Not of consecutive images, which are often of similar classes.
    grid = images.unflatten(0, (TILES, TILES, -1)).permute(2, 3, 0, 4, 1, 5)
    return grid.flatten(4).flatten(2, 3)[..., : splits.image_size, : splits.image_size]


def pairs(
    images: torch.Tensor, labels: torch.Tensor, mosaics: torch.Tensor | None = None, times: int = 1
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns batches as a user may pass them instead of a dataset, normalized; images and `times` mosaics in turns."""
    labels = labels[: len(images)]
    if mosaics is not None:
        count = min(len(images), len(mosaics) // times)
        others = mosaics[: count * times].unflatten(0, (count, times))
        images = torch.cat([images[:count, None], others], 1).flatten(0, 1)
        labels = torch.cat([labels[:count, None], torch.full((count, times), UNLABELLED)], 1).flatten()
    return list(zip(images.split(32), labels.split(32), strict=True))


def compressed(
    original: nn.Module, rules: str, images: list[tuple[torch.Tensor, torch.Tensor]], steps: int
) -> nn.Module:
    prescription = rx.prescribe(rx.diagnose(original, images, moments=True, batch_size=32), rules)
    # The diagnosis, the realization and the repair use the same images.
    return realize_and_fit(original, prescription, images, [Repair(steps)] if steps else [])


@torch.no_grad()
def outputs(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    # float64: the divergence of nearly equal models is a small difference of logarithms.
    return torch.cat([model(part) for part in images.split(50)]).double().log_softmax(-1)


def divergences(reference: torch.Tensor, other: torch.Tensor) -> np.ndarray:
    return (reference.exp() * (reference - other)).sum(-1).numpy()


def row(own: np.ndarray, others: np.ndarray) -> str:
    """Formats both means and their ratio with bootstrap intervals over the images, which are the same in both."""
    draws = np.random.default_rng(0).integers(0, len(own), (2000, len(own)))
    means = own[draws].mean(1), others[draws].mean(1)
    values = own.mean(), others.mean(), others.mean() / own.mean()
    spreads = [np.quantile(sample, [0.025, 0.975]) for sample in (*means, means[1] / means[0])]
    return " | ".join(
        f"{value:.3f} [{low:.3f}, {high:.3f}]" for value, (low, high) in zip(values, spreads, strict=True)
    )


if __name__ == "__main__":
    main()
