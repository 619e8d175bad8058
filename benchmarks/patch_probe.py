"""Compares a linear segmentation probe on the original's patch features with probes on pruned or merged tokens.

    python benchmarks/patch_probe.py timm:vit_tiny_patch16_224 --weights W --data imagenette224.parquet \
        --test-column ilsvrc_val --policies ward:12@every tome:13@every

For every policy, the script prints the findings of the check `PatchProbe` and the error of the features.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.nn.functional import interpolate, one_hot

import attnrx as rx
from attnrx.cli.options import add_data, add_model, model_argument, splits_argument
from attnrx.data import require_labelled
from attnrx.data.images import rank_within_class
from attnrx.nouns.evidence import Finding
from attnrx.show.checks.check import Check, Comparison
from attnrx.show.checks.outputs import PatchTable, patch_features
from attnrx.show.checks.statistics import mean_change, mean_share
from attnrx.support.errors import DataError, NotSupported
from attnrx.support.modules import evaluating
from attnrx.support.shapes import Float, Int, Tensor


@dataclass(frozen=True)
class PatchProbe(Check):
    """The change of accuracy of a linear segmentation probe on patch features, in points.

    Each image of the probe is a mosaic of 2 x 2 images at half the size. The label of a patch is the class of its
    quadrant. Patches across two quadrants have no label. Half of the images of every class train the probe, and the
    other half test it. The probe is a ridge regression on the classes, with the weight `ridge` relative to the mean
    eigenvalue. One probe is trained on the reference's features, and another on the candidate's features. For each
    probe, the check claims that the candidate loses at most `most_drop` points. Changes are paired by mosaic, and
    intervals are over mosaics.
    """

    name: ClassVar[str] = "patch_probe"
    on_request: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ("labels", "classes", "layers")
    ridge: float = 0.01
    most_drop: float | None = 1.0

    def __call__(self, comparison: Comparison) -> tuple[Finding, ...]:
        # Mosaics turn image labels into patch labels, so no segmentation dataset is needed. The probe is linear,
        # because a larger decoder could compensate for errors of the features.
        train, test = mosaics_of(comparison)
        models = {"reference": comparison.reference, "candidate": comparison.candidate}
        with evaluating(models.values()):
            tables = {
                role: [
                    torch.cat([patch_features(model, part).cpu() for part in mosaics.split(comparison.batch_size)])
                    for mosaics, _ in (train, test)
                ]
                for role, model in models.items()
            }
        (height, width) = train[0].shape[-2:]
        labels = [
            quadrant_labels(quadrants, tables["reference"][0].shape[1], height / width)
            for _, quadrants in (train, test)
        ]
        classes = 1 + int(max(patch_labels.max() for patch_labels in labels))
        probes = {role: ridge_probe(table[0], labels[0], classes, self.ridge) for role, table in tables.items()}
        base = patch_accuracy(probes["reference"], tables["reference"][1], labels[1])
        # A loss with the reference's probe shows that features moved. A loss with the candidate's own probe shows that
        # the features lost information.
        retrained = patch_accuracy(probes["candidate"], tables["candidate"][1], labels[1])
        same = patch_accuracy(probes["reference"], tables["candidate"][1], labels[1])
        n, seed = len(base), comparison.seed
        accuracy, claim = mean_share(base, seed).scaled(100.0), "accuracy of the segmentation probe, reference"
        details: dict[str, Any] = {"model": "reference"}
        findings = [self.finding("patch accuracy", claim, accuracy, "%", n=n, seed=seed, details=details)]
        for probe, accuracies in (("the reference", same), ("the candidate", retrained)):
            change, where = mean_change(accuracies - base, seed), f" of patches, by the probe trained on {probe}"
            details, quantity = {"probe": probe, "train": len(train[0])}, "patch accuracy change"
            findings.append(
                self.change_of_accuracy(where, change, self.most_drop, n, quantity=quantity, seed=seed, details=details)
            )
        return tuple(findings)


Mosaics = tuple[Float[Tensor, "_ channels height width"], Int[Tensor, "_ 4"]]


def mosaics_of(comparison: Comparison) -> tuple[Mosaics, Mosaics]:
    """Returns the training mosaics and the test mosaics, with the classes of their quadrants.

    The images of every class go alternately to the training and to the test mosaics. Every image is in four mosaics,
    once in each quadrant.

    Raises:
        DataError: The images have one class, or are too few for a mosaic.
    """
    batches = list(comparison.data.batches(comparison.batch_size, device=comparison.device))
    images, labels = (torch.cat([getattr(batch, name) for batch in batches]) for name in ("images", "labels"))
    require_labelled(labels)
    if len(labels.unique()) < 2:
        raise DataError(
            f"patch_probe separates classes, and all {len(labels)} images have the label {int(labels[0])}: give images "
            "of at least two classes."
        )
    # Every class is split separately. Data are often sorted by class, so a plain split would test on untrained classes.
    second = rank_within_class(labels.cpu(), torch.arange(len(labels))) % 2 == 1
    if (tested := int(second.sum())) < 4:
        raise DataError(
            f"the probe is trained on one half of every class and tested on the other, which has {tested} of these "
            f"{len(images)} images, and a mosaic takes four: give at least 8 images, two or more of a class."
        )
    generator = torch.Generator().manual_seed(comparison.seed)
    # Images are shrunk by area averages, which do not alias. A mosaic has the size of one image, as the model requires.
    small = interpolate(images, scale_factor=0.5, mode="area")
    halves = []
    # Images were split before mosaics are made, so no image is in both halves.
    for part in ((~second).nonzero().flatten(), second.nonzero().flatten()):
        # Each quadrant has another permutation, so an image has different neighbours in each mosaic.
        orders = [part[torch.randperm(len(part), generator=generator)].to(labels.device) for _ in range(4)]
        rows = [torch.cat([small[orders[row]], small[orders[row + 1]]], dim=-1) for row in (0, 2)]
        halves.append((torch.cat(rows, dim=-2), torch.stack([labels[order] for order in orders], dim=1).cpu()))
    return halves[0], halves[1]


def quadrant_labels(classes: Int[Tensor, "mosaics 4"], patches: int, ratio: float) -> Int[Tensor, "mosaics patches"]:
    """Returns the class of every patch, or -1 for a patch across two quadrants. `ratio` is height over width.

    Raises:
        NotSupported: There are fewer than 2 x 2 patches.
    """
    # Patches are square, so patches = rows * columns and rows / columns = height / width.
    rows = round((patches * ratio) ** 0.5)
    columns = patches // rows

    def halves(count: int) -> Int[Tensor, " count"]:
        index = torch.arange(count)
        return torch.where(index < count // 2, 0, 1).masked_fill(2 * index + 1 == count, -1)

    if min(rows, columns) < 2:
        raise NotSupported(
            f"patch_probe labels the patches of the quadrants of a mosaic, and this model has {rows} x {columns} "
            "patches: it needs at least 2 x 2."
        )
    row, column = halves(rows)[:, None], halves(columns)[None]
    quadrant = torch.where((row < 0) | (column < 0), -1, 2 * row + column).flatten()
    return classes[:, quadrant.clamp(min=0)].masked_fill(quadrant < 0, -1)


def ridge_probe(
    table: PatchTable, labels: Int[Tensor, "images patches"], classes: int, ridge: float
) -> Float[Tensor, "features_and_one classes"]:
    """Returns the weights of a ridge regression on the classes. The last row is the bias."""
    used = labels >= 0
    rows, targets = _with_one(table[used]), one_hot(labels[used], classes).double()
    gram = rows.T @ rows
    penalty = ridge * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    # The bias is not penalized.
    penalty[-1, -1] = 0
    return torch.linalg.solve(gram + penalty, rows.T @ targets)


def patch_accuracy(
    probe: Float[Tensor, "features_and_one classes"], table: PatchTable, labels: Int[Tensor, "images patches"]
) -> Float[Tensor, "images"]:
    """Returns, for every image, the share of its labelled patches that the probe classifies correctly."""
    used = labels >= 0
    correct = ((_with_one(table) @ probe).argmax(-1) == labels) & used
    return correct.sum(1).double() / used.sum(1)


def _with_one(table: Float[Tensor, "*rows features"]) -> Float[Tensor, "*rows features_and_one"]:
    return torch.cat([table, torch.ones_like(table[..., :1])], dim=-1)


def main(words: Sequence[str] | None = None) -> None:
    """Verifies every policy, and prints its findings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    add_data(parser, "whose test images are used")
    parser.add_argument("--policies", nargs="+", default=["ward:12@every", "tome:13@every"])
    parser.add_argument("--images", type=int, help="the first N images only, balanced over classes")
    parser.add_argument("--batch", type=int, default=16)
    arguments = parser.parse_args(words)
    original = model_argument(arguments.model, None, arguments.weights, arguments.trust).eval()
    images = splits_argument(original, arguments).test
    images = images if arguments.images is None else images.take(arguments.images)
    for policy in arguments.policies:
        small = rx.realize(original, rx.prescribe(original, f"tokens={policy}")).eval()
        found = rx.verify(small, original, images, (PatchProbe(), rx.checks.Features()), batch_size=arguments.batch)
        for finding in found.findings:
            interval = "" if finding.low is None else f" [{finding.low:.3g}, {finding.high:.3g}]"
            print(f"{policy}: {finding.claim}: {finding.value:.3g} {finding.unit}{interval}")


if __name__ == "__main__":
    main()
