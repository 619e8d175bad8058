"""The check `Controls`, which compares a candidate with models whose directions were pruned by other criteria."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from statistics import fmean, stdev
from typing import Any, ClassVar

import torch
from torch import nn

from attnrx.change.predictions import Predictions
from attnrx.change.realization.realizing import KINDS, Fit, realize_and_fit
from attnrx.nouns.evidence import Finding
from attnrx.nouns.prescription import Prescription
from attnrx.show.checks.check import Check, Comparison
from attnrx.show.checks.outputs import discrepancy, squared_distances
from attnrx.show.checks.statistics import estimate, resampled_means
from attnrx.support.errors import InvalidInput
from attnrx.support.records import from_dict
from attnrx.support.shapes import Float, Tensor
from attnrx_lab.rules.controls import control_prescriptions

CLAIMED = "largest"  # the check claims that this control has a larger discrepancy


@dataclass(frozen=True)
class Controls(Check):
    """Compares the candidate with matched controls, which prune the same number of directions by another criterion.

    `prescriptions` contains one or several pruning plans (draws) for each kind of control ("random", "largest",
    "uniform"). `realize` builds a model from a plan with the candidate's settings. By default the check prescribes
    `draws` random controls and one control of each other kind from the comparison's diagnosis. It realizes them with
    the settings that the candidate's prescription records.

    The check returns two findings per kind. The first is the control's discrepancy minus the candidate's discrepancy
    (SVDA, Eq. 46). The second is the candidate's accuracy minus the control's accuracy, in points. Values above 0
    favour the candidate. The intervals come from a paired bootstrap over the images and, if a control has several
    draws, over the draws. For "largest" the check claims that the candidate's discrepancy is smaller. The claim holds
    if the whole interval is above 0, and fails if the whole interval is below 0. The details contain the control's
    rules and token policy. If the control has no rule for a part of the model, this part is pruned as in the candidate.
    """

    needs: ClassVar[tuple[str, ...]] = ("labels", "decisions")
    prescriptions: Mapping[str, tuple[Prescription, ...]] | None = None
    realize: Callable[[Prescription], nn.Module] | None = None
    draws: int = 10

    def require(self, comparison: Comparison) -> None:
        """Raises InvalidInput if the diagnosis, the splits or the candidate's recorded settings are missing."""
        self._matched(comparison)

    def _matched(
        self, comparison: Comparison
    ) -> tuple[Mapping[str, tuple[Prescription, ...]], Callable[[Prescription], nn.Module]]:
        """Returns controls with the candidate's ranks, and a function that builds their models like the candidate."""
        if self.prescriptions is not None and self.realize is not None:
            return self.prescriptions, self.realize
        prescription, diagnosis, splits = comparison.prescription, comparison.diagnosis, comparison.splits
        how = {} if prescription is None else prescription.about.get("realized", {})
        if prescription is None or diagnosis is None or not how or splits is None:
            raise InvalidInput(
                "controls are prescribed from a diagnosis and realized with the candidate's settings on training "
                "images: give diagnosis (--diagnosis FILE), splits, and a candidate made by `attnrx realize`, whose "
                "folder records its settings."
            )
        images = splits.train.take(min(how["calibration_images"], len(splits.train)))
        settings = {"images": images, "fits": recorded_fits(how), "by": how["by"]}
        prescriptions = control_prescriptions(diagnosis, prescription, draws=self.draws, seed=comparison.seed)
        return prescriptions, partial(realize_and_fit, comparison.reference, **settings)

    def __call__(self, comparison: Comparison) -> tuple[Finding, ...]:
        """Builds one control model at a time to limit memory, and compares each with the candidate."""
        prescriptions, realize = self._matched(comparison)
        predictions = comparison.predictions
        candidate = tallied(predictions, "candidate", predictions)
        findings: list[Finding] = []
        for kind, draws in prescriptions.items():
            models = [candidate]
            for prescription in draws:
                control = comparison.of(realize(prescription)).predictions
                models.append(tallied(control, "candidate", predictions))
            findings += self._against(kind, dict(draws[0].rules), torch.stack(models, dim=1), comparison.seed)
        return tuple(findings)

    def _against(
        self, kind: str, rules: dict[str, str], models: Float[Tensor, "images models 3"], seed: int
    ) -> tuple[Finding, Finding]:
        """Compares the candidate, which is the first entry of `models`, with the draws of one kind of control."""
        # [bootstrap samples, models, 3]. A sample has the same images for all models, so the differences are paired.
        resampled = resampled_means(models.flatten(1), seed).unflatten(1, (-1, 3))
        controls = resample_draws(resampled[:, 1:], seed)
        means = models.mean(0)  # [models, 3]
        distances, accuracies = discrepancy(means[:, :2]).tolist(), (100 * means[:, 2]).tolist()
        # SVDA's Eq. 46 is a ratio of two means, not a mean over images. So average both sums first, then divide.
        nearer = estimate(
            fmean(distances[1:]) - distances[0],
            discrepancy(controls[..., :2]).mean(1) - discrepancy(resampled[:, 0, :2]),
        )
        better = estimate(accuracies[0] - fmean(accuracies[1:]), 100 * (resampled[:, 0, 2] - controls[..., 2].mean(1)))
        claim, limit = f"discrepancy to the reference, {kind}-matched control minus candidate", None
        if kind == CLAIMED:
            claim, limit = f"the candidate is nearer to the reference than the {kind}-matched control", 0.0
        n, about = len(models), {"kind": kind, "rules": rules}
        far, right = spread(distances, lower_is_better=True), spread(accuracies, lower_is_better=False)
        other = f"accuracy, candidate minus {kind}-matched control"
        return (
            self.finding("discrepancy", claim, nearer, n=n, limit=limit, side=">", seed=seed, details=about | far),
            self.finding("accuracy", other, better, "points", n=n, seed=seed, details=about | right),
        )


def tallied(predictions: Predictions, role: str, base: Predictions) -> Float[Tensor, "images 3"]:
    """Returns, for each image, the two sums of squares in SVDA's Eq. 46, and 1 if the prediction is correct, else 0.

    They are the squared distance from the reference model's outputs in `base`, and the squared norm of these outputs.
    """
    squares = squared_distances(base.outputs["reference"], predictions.outputs[role])
    return torch.cat([squares, predictions.correct(role).double()[:, None]], dim=1)


def resample_draws(controls: Float[Tensor, "samples draws 3"], seed: int) -> Float[Tensor, "samples draws 3"]:
    """Resamples the draws of the control in every bootstrap sample, because the draws are a sample too."""
    samples, draws, columns = controls.shape
    chosen = torch.randint(draws, (samples, draws, 1), generator=torch.Generator().manual_seed(seed))
    return controls.gather(1, chosen.expand(-1, -1, columns))


def spread(values: list[float], *, lower_is_better: bool) -> dict[str, Any]:
    """Compares the candidate's value, the first in `values`, with the values of all draws of a control.

    The p-value `p` is the share of all values, including the candidate's, that are at least as good as the candidate's.
    """
    candidate, draws = values[0], values[1:]
    as_good = sum(draw <= candidate if lower_is_better else draw >= candidate for draw in draws)
    return {
        "candidate": candidate,
        "control": fmean(draws),
        "draws": draws,
        "deviation": stdev(draws) if len(draws) > 1 else None,
        "p": (1 + as_good) / (1 + len(draws)),
    }


def recorded_fits(record: Mapping[str, Any]) -> tuple[Fit, ...]:
    """Returns the fits (repair, distillation) in a prescription's record, in the order in which they ran.

    Raises:
        InvalidInput: A setting is unknown or not valid.
    """
    found = []
    for name, (kind, count) in KINDS.items():
        if record.get(name):
            settings = {count: record[name], **record.get("settings", {}).get(name, {})}
            if unknown := sorted(settings.keys() - {field.name for field in fields(kind)}):
                raise InvalidInput(f"the record of {name} has the unknown setting {unknown[0]!r}; realize again.")
            found.append(from_dict(settings, kind))
    return tuple(found)
