"""Robustness: paired change of accuracy on corrupted images."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import nn

from attnrx.checks.accuracy import change_of_accuracy
from attnrx.checks.check import Check
from attnrx.checks.comparison import Comparison, answer
from attnrx.checks.statistics import mcnemar, mean_change, paired_change, proportion
from attnrx.data import Batch, Normalization
from attnrx.errors import InvalidInput, UnknownName
from attnrx.evidence import Finding
from attnrx.models import evaluating, family_of
from attnrx.runtime import processes
from attnrx.shapes import Bool, Int, Tensor
from attnrx_lab.corruptions import CORRUPTION_GROUPS, CORRUPTIONS, SEVERITIES, Corruption

# Pixels may lie this far outside [0, 1] after the normalization is inverted: rounding.
ROUNDING = 1e-3
# One of each kind, by default.
FEW = ("gaussian_noise", "gaussian_blur", "jpeg_compression", "contrast")

Right = Mapping[tuple[str, int], Bool[Tensor, "images"]]  # which images are classified as labelled
Part = tuple[str, tuple[str, ...], tuple[int, ...]]  # in words, and the corruptions and severities that are averaged


@dataclass(frozen=True)
class Robustness(Check):
    """The paired change of accuracy on corrupted images: for every corruption and severity, and their means.

    `corruptions` are names of CORRUPTIONS, or groups: "common" (the fifteen of ImageNet-C), "extra" (its other four),
    "all". Each finding also contains both accuracies; one for a corruption at a severity, the agreement of the models,
    too. There is a mean over everything and, where it differs, over the common ones and for every severity. All models
    receive the same corrupted images, whatever the batch size; only the first `images` (None: all) are used.
    `most_drop` limits, in points, the loss of the candidate over all corruptions, as in the accuracy check; None only
    reports.
    """

    name: ClassVar[str] = "robustness"
    needs_labels: ClassVar[bool] = True
    corruptions: tuple[str, ...] = FEW
    severities: tuple[int, ...] = SEVERITIES
    images: int | None = 2000
    most_drop: float | None = None

    def __post_init__(self):
        if not self.corruptions or not self.severities or (self.images is not None and self.images < 1):
            raise InvalidInput(
                f"Robustness(corruptions={self.corruptions}, severities={self.severities}, images={self.images}): "
                "give at least one of each."
            )
        for name in self.corruptions:
            if name not in CORRUPTIONS and name not in CORRUPTION_GROUPS:
                raise UnknownName("corruption", name, (*CORRUPTIONS, *CORRUPTION_GROUPS))
        if not set(self.severities) <= set(SEVERITIES):
            raise InvalidInput(f"Robustness(severities={self.severities}): choose from {SEVERITIES}, 1 is the mildest.")
        named = (single for name in self.corruptions for single in CORRUPTION_GROUPS.get(name, (name,)))
        object.__setattr__(self, "corruptions", tuple(dict.fromkeys(named)))
        object.__setattr__(self, "severities", tuple(sorted(set(self.severities))))

    def __call__(self, comparison: Comparison) -> tuple[Finding, ...]:
        return self.of_each({"candidate": comparison.candidate}, comparison)["candidate"]

    def of_each(self, candidates: Mapping[str, nn.Module], comparison: Comparison) -> dict[str, tuple[Finding, ...]]:
        """Returns the findings of several candidates; images are corrupted and the reference is run only once."""
        comparison = comparison.taking(self.images)
        models = {"": comparison.reference, **candidates}
        findings: dict[str, list[Finding]] = {name: [] for name in candidates}
        right: dict[str, dict[tuple[str, int], Tensor]] = {name: {} for name in models}
        ways = [(corruption, severity) for corruption in self.corruptions for severity in self.severities]
        for (corruption, severity), chosen in zip(ways, _chosen(models, ways, comparison), strict=True):
            for name in models:
                right[name][corruption, severity] = chosen.right(name)
            for name, own in findings.items():
                own.append(_finding(corruption, severity, name, chosen, comparison.seed))
        return {name: (*own, *self._means(right[""], right[name], comparison.seed)) for name, own in findings.items()}

    def _means(self, before: Right, after: Right, seed: int) -> list[Finding]:
        """Returns the means; the last is over everything, and may be a claim."""
        *parts, whole = self._parts()
        means = [_mean(part, before, after, None, seed) for part in parts]
        return [*means, _mean(whole, before, after, self.most_drop, seed)]

    def _parts(self) -> list[Part]:
        """Returns the groups to average over: everything and, where they differ, its common part and each severity."""
        common = tuple(name for name in CORRUPTION_GROUPS["common"] if name in self.corruptions)
        groups = [("all corruptions", self.corruptions)]
        if common == CORRUPTION_GROUPS["common"] and set(common) < set(self.corruptions):
            groups.insert(0, ("the common corruptions", common))
        each = tuple((severity,) for severity in self.severities) if len(self.severities) > 1 else ()
        parts = []
        for words, corruptions in groups:
            parts += [(f" over {words} of severity {own[0]}", corruptions, own) for own in each]
            parts.append((f" over {words}", corruptions, self.severities))
        return parts


@dataclass(frozen=True)
class _Chosen:
    """The classes that several models, named by their role, predict for the same corrupted images."""

    classes: Mapping[str, Int[Tensor, "images"]]
    labels: Int[Tensor, "images"]

    def right(self, role: str) -> Bool[Tensor, "images"]:
        return self.classes[role] == self.labels


def _chosen(
    models: Mapping[str, nn.Module], ways: Sequence[tuple[str, int]], comparison: Comparison
) -> Iterator[_Chosen]:
    """Returns the predictions for each corruption and severity; several processes share the corruptions."""
    process, count = comparison.place
    own = [_choose(models, CORRUPTIONS[name], severity, comparison) for name, severity in ways[process::count]]
    parts = processes.all_gathered(own) if comparison.together else [own]
    for number in range(len(ways)):
        yield parts[number % count][number // count]


def _choose(models: Mapping[str, nn.Module], corruption: Corruption, severity: int, comparison: Comparison) -> _Chosen:
    classes: dict[str, list[Tensor]] = {role: [] for role in models}
    labels = []
    with evaluating(models.values()):
        for batch, images in _corrupted(corruption, severity, comparison):
            labels.append(batch.labels.cpu())
            for role, model in models.items():
                classes[role].append(answer(model, images).argmax(-1).cpu())
    return _Chosen({role: torch.cat(parts) for role, parts in classes.items()}, torch.cat(labels))


def _finding(corruption: str, severity: int, name: str, chosen: _Chosen, seed: int) -> Finding:
    before, after = chosen.right(""), chosen.right(name)
    agreeing = int((chosen.classes[""] == chosen.classes[name]).sum())
    agreement = proportion(agreeing, len(chosen.labels)).scaled(100.0)
    details = {
        "quantity": "accuracy change",
        "corruption": corruption,
        "severity": severity,
        "reference_accuracy": 100 * float(before.double().mean()),
        "candidate_accuracy": 100 * float(after.double().mean()),
        "agreement": {"value": agreement.value, "low": agreement.low, "high": agreement.high},
        "mcnemar_p": mcnemar(int((before & ~after).sum()), int((~before & after).sum())),
    }
    where = f" under {corruption} of severity {severity}"
    # No limit for a single corruption: the claim is about their mean.
    finding = change_of_accuracy(Robustness.name, where, paired_change(before, after, seed), None, len(before))
    return replace(finding, seed=seed, details=details)


def _mean(part: Part, before: Right, after: Right, most_drop: float | None, seed: int) -> Finding:
    """Averages image by image, so that the interval is over images."""
    where, corruptions, severities = part
    keys = [(corruption, severity) for corruption in corruptions for severity in severities]
    # [corruptions, images] -> images
    first, then = (torch.stack([own[key] for key in keys]).double().mean(0) for own in (before, after))
    details = {
        "quantity": "mean accuracy change",
        "corruptions": list(corruptions),
        "severities": list(severities),
        "reference_accuracy": 100 * float(first.mean()),
        "candidate_accuracy": 100 * float(then.mean()),
    }
    finding = change_of_accuracy(Robustness.name, where, mean_change(then - first, seed), most_drop, len(first))
    return replace(finding, seed=seed, details=details)


def _corrupted(corruption: Corruption, severity: int, comparison: Comparison) -> Iterator[tuple[Batch, Tensor]]:
    """Returns the batches with their images corrupted on the device, back on the model's scale."""
    normalization = Normalization(*family_of(comparison.reference).normalization(comparison.reference))
    # One stream of random numbers on the CPU for the whole pass: the same noise in batches of any size, on any device.
    generator = torch.Generator().manual_seed(comparison.seed)
    for batch in comparison.data.batches(comparison.batch_size, device=comparison.device):
        pixels = normalization.invert(batch.images)
        if float(pixels.min()) < -ROUNDING or float(pixels.max()) > 1 + ROUNDING:
            raise InvalidInput(
                f"the images, taken back from the model's normalization (mean {normalization.mean}, std "
                f"{normalization.std}), leave [0, 1]: they were normalized otherwise. Use data.renormalized(...) first."
            )
        yield batch, normalization.apply(corruption(pixels.clamp(0, 1), severity, generator))
