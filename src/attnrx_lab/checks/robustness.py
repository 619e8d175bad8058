"""The check `Robustness`, which measures the paired change of accuracy on corrupted images."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from attnrx.change.predictions import outputs_of
from attnrx.data import Normalization, require_labelled
from attnrx.nouns.evidence import Finding
from attnrx.show.checks.check import Check, Comparison
from attnrx.show.checks.statistics import mcnemar, mean_change, paired_change, proportion
from attnrx.support.errors import InvalidInput, UnknownName
from attnrx.support.modules import evaluating
from attnrx.support.shapes import Int, Tensor
from attnrx.vit.models import family_of
from attnrx_lab.corruptions import CORRUPTION_GROUPS, CORRUPTIONS, SEVERITIES

# After the normalization is inverted, rounding may put pixels this far outside [0, 1].
ROUNDING = 1e-3
# The default corruptions, which need less time than all nineteen.
FEW = ("gaussian_noise", "gaussian_blur", "jpeg_compression", "contrast")

LABELS = "labels of the images"  # a key of `Classes`, in addition to the roles of the models
ROLES = ("reference", "candidate")

Way = tuple[str, int]  # a corruption and its severity
Classes = Mapping[str, Int[Tensor, "images"]]  # the classes that every model predicts, and the LABELS
Part = tuple[str, tuple[str, ...], tuple[int, ...]]  # a name in words, and the corruptions and severities to average


@dataclass(frozen=True)
class Robustness(Check):
    """Measures the paired change of accuracy on corrupted images, per corruption and severity, and on average.

    `corruptions` are names from CORRUPTIONS or groups: "common" (the fifteen main corruptions of ImageNet-C), "extra"
    (its other four) or "all". Each finding also contains the accuracies of both models. A finding for one corruption at
    one severity also contains how often the models agree. The last finding is always the mean over all corruptions and
    severities. If there are several severities, the check also returns the mean for every severity. If `corruptions`
    contains all common corruptions and others, it also returns the means over the common corruptions. Both models
    receive the same corrupted images, which do not depend on the batch size. The check uses at most `images` images, or
    all if `images` is None. `most_drop` limits how many percentage points of accuracy the candidate may lose on
    average. With `most_drop=None` the check makes no claim.
    """

    needs: ClassVar[tuple[str, ...]] = ("labels", "logits")
    corruptions: tuple[str, ...] = FEW
    severities: tuple[int, ...] = SEVERITIES
    images: int | None = 2000
    most_drop: float | None = None

    def __post_init__(self):
        super().__post_init__()
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
        """Compares both models on every corruption at every severity, and on average.

        Raises:
            InvalidInput: After the model's normalization is undone, pixels are outside [0, 1].
        """
        comparison = comparison.taking(self.images)
        ways = [(corruption, severity) for corruption in self.corruptions for severity in self.severities]
        classes = {way: _predict(way, comparison) for way in ways}
        # The limit applies to the mean over everything, which comes last. The other means are only reported.
        *parts, whole = self._parts()
        limits = [*((part, None) for part in parts), (whole, self.most_drop)]
        return (
            *(self._single(way, predictions, comparison.seed) for way, predictions in classes.items()),
            *(self._mean(part, classes, limit, comparison.seed) for part, limit in limits),
        )

    def _parts(self) -> list[Part]:
        """Returns the groups of corruptions and severities over which the check averages, without repeats."""
        groups = {"all corruptions": self.corruptions}
        common = CORRUPTION_GROUPS["common"]
        if set(common) < set(self.corruptions):
            groups = {"the common corruptions": common, **groups}
        parts = []
        for words, corruptions in groups.items():
            if len(self.severities) > 1:
                parts += [(f" over {words} of severity {own}", corruptions, (own,)) for own in self.severities]
            parts.append((f" over {words}", corruptions, self.severities))
        return parts

    def _single(self, way: Way, classes: Classes, seed: int) -> Finding:
        before, after = (classes[role] == classes[LABELS] for role in ROLES)
        agreement = proportion(int((classes["reference"] == classes["candidate"]).sum()), len(before)).scaled(100.0)
        details = {
            "corruption": way[0],
            "severity": way[1],
            "reference_accuracy": 100 * float(before.double().mean()),
            "candidate_accuracy": 100 * float(after.double().mean()),
            "agreement": {"value": agreement.value, "low": agreement.low, "high": agreement.high},
            "mcnemar_p": mcnemar(int((before & ~after).sum()), int((~before & after).sum())),
        }
        change, where = paired_change(before, after, seed), f" under {way[0]} of severity {way[1]}"
        # A single corruption has no limit, because the claim is only on the mean over all corruptions.
        return self.change_of_accuracy(where, change, None, len(before), seed=seed, details=details)

    def _mean(self, part: Part, classes: Mapping[Way, Classes], most_drop: float | None, seed: int) -> Finding:
        """Averages each image's results over the corruptions, then computes an interval over the images."""
        where, corruptions, severities = part
        predictions = [classes[corruption, severity] for corruption in corruptions for severity in severities]
        # [corruptions, images] -> images
        before, after = (
            torch.stack([each[role] == each[LABELS] for each in predictions]).double().mean(0) for role in ROLES
        )
        details = {
            "corruptions": list(corruptions),
            "severities": list(severities),
            "reference_accuracy": 100 * float(before.mean()),
            "candidate_accuracy": 100 * float(after.mean()),
        }
        change, n, quantity = mean_change(after - before, seed), len(before), "mean accuracy change"
        return self.change_of_accuracy(where, change, most_drop, n, quantity=quantity, seed=seed, details=details)


def _predict(way: Way, comparison: Comparison) -> Classes:
    models = {role: comparison.models[role] for role in ROLES}
    classes: dict[str, list[Tensor]] = {role: [] for role in (LABELS, *models)}
    decisions = comparison.require_logits(Robustness.name).decisions
    normalization = Normalization(*family_of(comparison.reference).normalization(comparison.reference))
    # One CPU generator draws all random numbers of the pass, so the noise is the same for any batch size and device.
    generator = torch.Generator().manual_seed(comparison.seed)
    with evaluating(models.values()):
        for batch in comparison.data.batches(comparison.batch_size, device=comparison.device):
            pixels = normalization.invert(batch.images)
            if float(pixels.min()) < -ROUNDING or float(pixels.max()) > 1 + ROUNDING:
                raise InvalidInput(
                    "the images, taken back from the model's normalization, leave [0, 1]: they were normalized "
                    "otherwise. Use splits.renormalized(...) first."
                )
            images = normalization.apply(CORRUPTIONS[way[0]](pixels.clamp(0, 1), way[1], generator))
            require_labelled(batch.labels)
            classes[LABELS].append(batch.labels.cpu())
            for role, model in models.items():
                classes[role].append(decisions(outputs_of(model, images)).cpu())
    return {role: torch.cat(parts) for role, parts in classes.items()}
