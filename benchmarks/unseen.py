"""Models of `attnrx shrink` on training images that nothing was chosen by: neither plan, repair nor calibration.

`shrink` plans and repairs on the first training images and measures predictions on others; the rest is unseen. Changes
of accuracy and divergences are relative to the original, with 95 % bootstrap intervals over the images.

python benchmarks/unseen.py MODEL FOLDER ... --weights FILE --data DATA --images 2000
"""

import argparse
from dataclasses import replace

import torch

import attnrx as rx
from attnrx.checks.statistics import mean_estimate
from attnrx.data import ImageSet
from attnrx.data.images import RowImages
from attnrx.models import family_of
from attnrx.planning.effort import effort_of
from attnrx.shrinking import DIAGNOSED, PREDICTED, three_parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("candidates", nargs="+", help="folders or files of one call of `attnrx shrink` each")
    parser.add_argument("--weights")
    parser.add_argument("--data", required=True)
    parser.add_argument("--label-column")
    parser.add_argument("--test-column")
    parser.add_argument("--effort", default="thorough", help="the largest of the candidates")
    parser.add_argument("--images", type=int, default=2000)
    given = parser.parse_args()
    original = rx.load(given.model, weights=given.weights).eval()
    columns = rx.data.Columns(label_column=given.label_column, test_column=given.test_column)
    size = family_of(original).input_shape(original)[1]
    splits = rx.adapt_preprocessing(rx.load_data(given.data, image_size=size, columns=columns), original)
    images = unseen(splits, given.effort).take(given.images)
    print(f"{len(images)} training images; torch {torch.__version__}")
    print("| candidate | top-1, change in points | agreement, % | KL (nats) |\n|---|---|---|---|")
    models = {"original": original, **{name: rx.load(name).eval() for name in given.candidates}}
    answers: dict[str, list[torch.Tensor]] = {name: [] for name in models}
    labels = []
    for batch in images.batches(50):
        labels.append(batch.labels)
        with torch.no_grad():
            for name, model in models.items():
                answers[name].append(model(batch.images).double().log_softmax(-1))
    known, logits = torch.cat(labels), {name: torch.cat(parts) for name, parts in answers.items()}
    reference = logits.pop("original")
    right, chosen = (reference.argmax(-1) == known).double(), reference.argmax(-1)
    print(f"| original | {100 * right.mean():.1f} | 100 | 0 |")
    for name, found in logits.items():
        own = (found.argmax(-1) == known).double()
        change = mean_estimate(own - right, seed=0).scaled(100)
        same = 100 * (found.argmax(-1) == chosen).double().mean()
        kl = mean_estimate((reference.exp() * (reference - found)).sum(-1), seed=0)
        top1 = f"{100 * own.mean():.1f} ({change.value:.1f} [{change.low:.1f}, {change.high:.1f}])"
        print(f"| {name} | {top1} | {same:.1f} | {kl.value:.3f} [{kl.low:.3f}, {kl.high:.3f}] |")


def unseen(splits: rx.data.Splits, effort: str) -> ImageSet:
    """Returns the training images that a call of `shrink` at this effort does not look at."""
    preset = effort_of(effort)
    planned, others, _ = three_parts(splits)
    assert isinstance(planned, RowImages) and isinstance(others, RowImages)
    used = max(preset.images, preset.repair_images, DIAGNOSED)
    seen = torch.cat([_first(planned, used), _first(others, PREDICTED)])
    rows = torch.cat([planned.rows, others.rows]).unique()
    return replace(planned, rows=rows[~torch.isin(rows, seen)])


def _first(images: RowImages, count: int) -> torch.Tensor:
    taken = images.take(min(count, len(images)))
    assert isinstance(taken, RowImages)
    return taken.rows


if __name__ == "__main__":
    main()
