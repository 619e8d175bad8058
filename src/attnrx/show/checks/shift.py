"""Shift: the divergence on classes that the calibration images did not have, relative to that on their own classes."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from attnrx.nouns.evidence import Finding
from attnrx.show.checks.check import Check
from attnrx.show.checks.comparison import Comparison
from attnrx.show.checks.statistics import mean_estimate, studentized
from attnrx.support.errors import InvalidInput
from attnrx.support.shapes import Float, Tensor

MIN_IMAGES = 2  # of each kind: the mean of one has no interval


@dataclass(frozen=True)
class Shift(Check):
    """Compares the divergence from the reference on images of other classes with that on the calibration's classes.

    Hidden units and repair are fitted to calibration images, and the candidate may be worse on images unlike them. The
    class of a test image is what the reference predicts, so that no labels are needed. `classes` are those of the
    calibration images, by default the ones that `attnrx shrink` recorded in the prescription, and `most` is the limit
    of the ratio. Classes differ in difficulty, which is part of the ratio (docs/results/hidden.md has one without a
    shift).
    """

    name: ClassVar[str] = "shift"
    on_request: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ("logits",)
    classes: tuple[int, ...] = ()
    most: float | None = None

    def __call__(self, comparison: Comparison) -> tuple[Finding, ...]:
        """Returns the mean divergence on both kinds of images and their ratio.

        Raises InvalidInput if the classes of the calibration are not known, or one kind has no test image.
        """
        predictions, seed = comparison.predictions, comparison.seed
        num_classes = comparison.require_logits(self.name).num_classes(predictions.outputs["reference"].shape[1])
        classes = self._classes(comparison)
        if wrong := [index for index in classes if not 0 <= index < num_classes]:
            raise InvalidInput(f"shift(classes={wrong[0]}): the model has the classes 0 to {num_classes - 1}.")
        # By the reference, as the classes of the calibration images were found, also for data without labels.
        decisions = predictions.decisions("reference")
        known = torch.isin(decisions, torch.tensor(classes, dtype=decisions.dtype))
        divergence = predictions.divergence("reference", "candidate")
        n = len(divergence)
        if min(int(known.sum()), int((~known).sum())) < MIN_IMAGES:
            raise InvalidInput(
                f"the check shift compares images of the {len(classes)} classes of the calibration "
                f"with others, and {int(known.sum())} of {n} images are of these classes: give images of both kinds, "
                f"at least {MIN_IMAGES} of each."
            )
        if not float(divergence[known].sum()) > 0:
            raise InvalidInput(
                "the check shift divides by the divergence on the classes of the calibration, which is 0: the "
                "candidate returns there what the reference returns."
            )
        # Sums of divergences and numbers of images of both kinds, so that all are resampled together.
        columns = torch.stack([divergence * known, known, divergence * ~known, ~known], dim=-1).double()
        findings = []
        for what, images in (("classes of the calibration", known), ("other classes", ~known)):
            claim, details = f"mean {predictions.kind.distance}, on images of {what}", {"classes": what}
            mean, count = mean_estimate(divergence[images], seed), int(images.sum())
            unit = predictions.kind.unit
            findings.append(self.finding("divergence by class", claim, mean, unit, n=count, seed=seed, details=details))
        ratio = studentized(columns, _ratio, seed, minimum=0.0)
        claim = "divergence on images of other classes, relative to the classes of the calibration"
        details = {"classes": list(classes)}
        return (
            *findings,
            self.finding("shift", claim, ratio, "x", n=n, limit=self.most, side="<=", seed=seed, details=details),
        )

    def _classes(self, comparison: Comparison) -> tuple[int, ...]:
        prescription = comparison.prescription
        recorded: Any = {} if prescription is None else prescription.about.get("realized", {})
        classes = self.classes or recorded.get("classes", ())
        if not classes:
            raise InvalidInput(
                "the check shift needs the classes of the calibration images: give a prescription of `attnrx shrink`, "
                "or shift(classes=0/217/482)."
            )
        return tuple(classes)


def _ratio(means: Float[Tensor, "*draws 4"]) -> Float[Tensor, "*draws"]:
    """Returns the second mean divergence over the first, from their sums and numbers of images."""
    # NaN in a resample without an image of one kind, which is left out.
    return means[..., 2] / means[..., 3] / (means[..., 0] / means[..., 1]).clamp(min=1e-30)
