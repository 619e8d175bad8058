"""Models of `attnrx shrink` on images that nothing was chosen by: neither plan, repair, calibration nor verification.

`shrink` plans and repairs on the first training images and measures predictions on others; the other training images
are unseen. With `--test-column`, which must have been given to `shrink` too, the test images that the column does not
select are unseen as well (in the ImageNette file they are training images of ILSVRC). Training images are used first,
these test images up to the number of `--images`. Changes of accuracy and divergences are relative to the original,
with 95 % bootstrap intervals over the images.

python benchmarks/unseen.py MODEL FOLDER ... --weights FILE --data DATA --images 2000
"""

import argparse
import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain

import torch

import attnrx as rx
from attnrx.cli.options import add_data, add_model, model_argument, option, splits_argument
from attnrx.data import FixedImages, ImageSet, three_parts
from attnrx.data.fixed_images import content_hashes, read_once
from attnrx.data.images import RowImages
from attnrx.nouns.effort import EFFORTS
from attnrx.show.checks.statistics import mean_estimate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser, "the original")
    parser.add_argument("candidates", nargs="+", help="folders or files of one call of `attnrx shrink` each")
    add_data(parser, "the data that `attnrx shrink` was given")
    option(parser, "--effort", tuple(EFFORTS), "the largest of the candidates", "thorough")
    parser.add_argument("--images", type=int, default=2000, help="the largest number of images")
    arguments = parser.parse_args()
    original = model_argument(arguments.model, "cpu", arguments.weights, arguments.trust).eval()
    splits = splits_argument(original, arguments)
    unseen: dict[str, ImageSet] = {"training images": unseen_training_images(splits, arguments.effort)}
    if arguments.test_column is not None:
        everything = splits_argument(original, argparse.Namespace(**{**vars(arguments), "test_column": None}))
        kind = f"test images that {arguments.test_column} does not select"
        unseen[kind] = unselected_test_images(splits.test, everything.test)
    images = first_images(unseen, arguments.images)
    if not images:
        sys.exit(f"no image of {arguments.data} is unseen at --effort {arguments.effort}.")
    counts = " and ".join(f"{len(each)} {kind}" for kind, each in images.items())
    print(f"{counts}; torch {torch.__version__}")
    print("| candidate | top-1, change in points | agreement, % | KL (nats) |\n|---|---|---|---|")
    models = {"original": original, **{name: rx.load(name).eval() for name in arguments.candidates}}
    answers: dict[str, list[torch.Tensor]] = {name: [] for name in models}
    labels = []
    for batch in chain.from_iterable(each.batches(50) for each in images.values()):
        labels.append(batch.labels)
        with torch.no_grad():
            for name, model in models.items():
                answers[name].append(model(batch.images).double().log_softmax(-1))
    true_classes, logits = torch.cat(labels), {name: torch.cat(parts) for name, parts in answers.items()}
    reference = logits.pop("original")
    reference_classes = reference.argmax(-1)
    right = (reference_classes == true_classes).double()
    print(f"| original | {100 * right.mean():.1f} | 100 | 0 |")
    for name, candidate in logits.items():
        candidate_right = (candidate.argmax(-1) == true_classes).double()
        change = mean_estimate(candidate_right - right, seed=0).scaled(100)  # paired
        same = 100 * (candidate.argmax(-1) == reference_classes).double().mean()
        kl = mean_estimate((reference.exp() * (reference - candidate)).sum(-1), seed=0)
        top1 = f"{100 * candidate_right.mean():.1f} ({change.value:.1f} [{change.low:.1f}, {change.high:.1f}])"
        print(f"| {name} | {top1} | {same:.1f} | {kl.value:.3f} [{kl.low:.3f}, {kl.high:.3f}] |")


def unseen_training_images(splits: rx.data.Splits, effort: str) -> FixedImages:
    """Returns the training and validation images that a call of `shrink` at this effort does not look at."""
    # Divided as by `shrink`; the smaller sets that it takes are parts of these.
    parts = three_parts(splits, EFFORTS[effort].fitted_images, EFFORTS[effort].predicted_images)
    seen = torch.cat([content_hashes(batch.images) for part in parts for batch in part.batches(50)])
    batches = chain.from_iterable(images.batches(50) for images in (splits.train, splits.validation))
    found = read_once(batches, splits.name, normalization=splits.normalization, distinct=True)
    return found.at((~torch.isin(found.hashes, seen)).nonzero()[:, 0])


def unselected_test_images(selected: ImageSet, everything: ImageSet) -> ImageSet:
    """Returns the images of the whole test split that are not in the selected part of it."""
    # Both loads store the test split on its own, so positions differ: an image is identified by its row in the file.
    assert isinstance(selected, RowImages) and isinstance(everything, RowImages)  # as the command line loads them
    # The row in the file of every image.
    chosen, rows = (each.store.sources[each.rows] for each in (selected, everything))
    return replace(everything, rows=everything.rows[~torch.isin(rows, chosen)])


def first_images(sets: Mapping[str, ImageSet], most: int) -> dict[str, ImageSet]:
    """Takes at most so many images, from the first set first; sets of which nothing is taken are omitted."""
    selected, remaining = {}, most
    for kind, images in sets.items():
        if count := min(remaining, len(images)):
            selected[kind] = images.take(count)
            remaining -= count
    return selected


if __name__ == "__main__":
    main()
