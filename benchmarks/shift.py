"""Divergence on classes that the calibration images have and on others: what each map owes to its calibration images.

Every prescription is calibrated on images of half of the classes, and measured on test images of those and of the other
half; beside it the same prescription calibrated on as many images of all classes, so that harder classes do not count
as a shift.

python benchmarks/shift.py MODEL --weights FILE --data DATA --rules 'hidden=uniform_rank:0.75' 'qk=total_rank:0.5'
"""

import argparse

import numpy as np
import torch
from torch import nn

import attnrx as rx
from attnrx.data import ImageSet
from attnrx.models import family_of
from attnrx.realization import realize_fitted
from attnrx.realization.repair import Repair


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--weights")
    parser.add_argument("--data", required=True)
    parser.add_argument("--label-column")
    parser.add_argument("--test-column")
    parser.add_argument(
        "--rules", nargs="+", required=True, help="rules of `attnrx prescribe`; ' repair=STEPS' repairs"
    )
    parser.add_argument("--calibration-images", type=int, default=512)
    parser.add_argument("--images", type=int, default=500)
    given = parser.parse_args()
    original = rx.load(given.model, weights=given.weights).eval()
    columns = rx.data.Columns(label_column=given.label_column, test_column=given.test_column)
    size = family_of(original).input_shape(original)[1]
    splits = rx.adapt_preprocessing(rx.load_data(given.data, image_size=size, columns=columns), original)
    tested, test_labels = stacked(splits.test.take(min(given.images, len(splits.test))))
    classes = sorted(set(test_labels.tolist()))
    known = torch.isin(test_labels, torch.tensor(classes[: len(classes) // 2]))
    pool, labels = stacked(splits.train.take(min(2 * given.calibration_images, len(splits.train))))
    half = torch.isin(labels, torch.tensor(classes[: len(classes) // 2]))
    calibrations = {
        "half": pairs(pool[half][: given.calibration_images], labels[half]),
        "all": pairs(pool[: given.calibration_images], labels),
    }
    print(f"classes of the calibration: {classes[: len(classes) // 2]}; torch {torch.__version__}")
    print("| prescription | calibration | KL, its classes | KL, other classes | other / its |")
    print("|---|---|---|---|---|")
    reference = outputs(original, tested)
    for text in given.rules:
        rules, _, steps = text.partition(" repair=")
        for name, images in calibrations.items():
            model = compressed(original, rules, images, int(steps or 0))
            found = divergences(reference, outputs(model, tested))
            print(f"| `{text}` | {name} | {row(found[known], found[~known])} |", flush=True)


def stacked(images: ImageSet) -> tuple[torch.Tensor, torch.Tensor]:
    batches = list(images.batches(64))
    return torch.cat([batch.images for batch in batches]), torch.cat([batch.labels for batch in batches])


def pairs(images: torch.Tensor, labels: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns batches of a user's own, already normalized."""
    return list(zip(images.split(32), labels[: len(images)].split(32), strict=True))


def compressed(
    original: nn.Module, rules: str, images: list[tuple[torch.Tensor, torch.Tensor]], steps: int
) -> nn.Module:
    prescription = rx.prescribe(rx.diagnose(original, images, moments=True, batch_size=32), rules)
    if not steps:
        return rx.realize(original, prescription, calibration=images)
    fits = [lambda found: rx.repair(found, original, images, Repair(steps)).model]
    return realize_fitted(original, prescription, fits, calibration=images)


@torch.no_grad()
def outputs(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    return torch.cat([model(part) for part in images.split(50)]).double().log_softmax(-1)


def divergences(reference: torch.Tensor, other: torch.Tensor) -> np.ndarray:
    return (reference.exp() * (reference - other)).sum(-1).numpy()


def row(own: np.ndarray, others: np.ndarray) -> str:
    """Formats both means and their ratio with bootstrap intervals over the images."""
    draw = np.random.default_rng(0)
    means = [part[draw.integers(0, len(part), (2000, len(part)))].mean(1) for part in (own, others)]
    texts = [
        f"{value:.3f} [{low:.3f}, {high:.3f}]"
        for value, (low, high) in (
            (own.mean(), np.quantile(means[0], [0.025, 0.975])),
            (others.mean(), np.quantile(means[1], [0.025, 0.975])),
            (others.mean() / own.mean(), np.quantile(means[1] / means[0], [0.025, 0.975])),
        )
    ]
    return " | ".join(texts)


if __name__ == "__main__":
    main()
