"""Fidelity: logit discrepancy, prediction agreement and KL divergence between two models."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from attnrx.checks.check import Check
from attnrx.checks.comparison import Comparison, Predictions
from attnrx.checks.statistics import estimate, mean_estimate, proportion, resampled_means
from attnrx.errors import InvalidInput
from attnrx.evidence import Finding, judged
from attnrx.shapes import Float, Tensor

# The stabilizer epsilon of Eq. 46.
STABILIZER = 1e-12


@dataclass(frozen=True)
class Pair:
    """Two models by role: `other` is compared with `base`. A limit of None means that the quantity is only reported."""

    base: str
    other: str
    most_discrepancy: float | None = None
    least_agreement: float | None = None

    @property
    def title(self) -> str:
        """The pair as text."""
        return f"{self.other} against {self.base}"


@dataclass(frozen=True)
class Fidelity(Check):
    """Relative logit discrepancy (Eq. 46), prediction agreement (Eq. 47) and KL divergence of pairs of models.

    The paper compares the compressed model with the masked one only; here both are compared with the reference too.
    `masked` replaces the masked model of the comparison. `most_discrepancy` (a share) and `least_agreement` (in %) are
    limits for the candidate against the reference; `most_from_masked` limits the discrepancy between candidate and
    masked model, e.g. 1e-5 for an exact compression.
    """

    name: ClassVar[str] = "fidelity"
    masked: nn.Module | None = None
    most_discrepancy: float | None = None
    least_agreement: float | None = None
    most_from_masked: float | None = None

    def __post_init__(self):
        for knob in ("most_discrepancy", "least_agreement", "most_from_masked"):
            limit = getattr(self, knob)
            if limit is not None and limit < 0:
                raise InvalidInput(f"Fidelity({knob}={limit}): a limit is 0 or more; omit it to only report.")

    def __call__(self, comparison: Comparison) -> tuple[Finding, ...]:
        """Returns three findings per pair of models."""
        comparison = comparison.with_masked(self.masked)
        predictions = comparison.predictions
        return tuple(
            finding for pair in self._pairs(comparison) for finding in _findings(pair, predictions, comparison)
        )

    def _pairs(self, comparison: Comparison) -> Iterator[Pair]:
        yield Pair("reference", "candidate", self.most_discrepancy, self.least_agreement)
        if comparison.masked is not None and comparison.masked is not comparison.candidate:
            yield Pair("reference", "masked")
            yield Pair("masked", "candidate", self.most_from_masked)
        elif self.most_from_masked is not None:
            raise InvalidInput(
                f"Fidelity(most_from_masked={self.most_from_masked}) needs a masked model that is not the candidate; "
                'realize the prescription with by="mask" and pass it as masked.'
            )


def squared_distances(
    base: Float[Tensor, "images classes"], other: Float[Tensor, "images classes"]
) -> Float[Tensor, "images 2"]:
    """Returns the squared norms of the difference and of the base per image: the two sums of Eq. 46."""
    base, other = base.double(), other.double()
    return torch.stack([(base - other).square().sum(-1), base.square().sum(-1)], dim=-1)


def discrepancy(squares: Float[Tensor, "*draws 2"]) -> Float[Tensor, "*draws"]:
    """Returns the relative logit discrepancy (Eq. 46) from sums or means of squared distances."""
    return squares[..., 0].sqrt() / (squares[..., 1].sqrt() + STABILIZER)


def divergence(
    base: Float[Tensor, "images classes"], other: Float[Tensor, "images classes"]
) -> Float[Tensor, "images"]:
    """Returns the Kullback-Leibler divergence KL(base || other) of the predicted probabilities per image, in nats."""
    log_base, log_other = base.double().log_softmax(-1), other.double().log_softmax(-1)
    return (log_base.exp() * (log_base - log_other)).sum(-1)


def _findings(pair: Pair, predictions: Predictions, comparison: Comparison) -> tuple[Finding, ...]:
    return (
        _discrepancy(pair, predictions, comparison),
        _agreement(pair, predictions),
        _divergence(pair, predictions, comparison.seed),
    )


def _discrepancy(pair: Pair, predictions: Predictions, comparison: Comparison) -> Finding:
    squares = squared_distances(predictions.logits[pair.base], predictions.logits[pair.other])
    found = estimate(float(discrepancy(squares.mean(0))), discrepancy(resampled_means(squares, comparison.seed)))
    batches = torch.stack([discrepancy(batch.sum(0)) for batch in squares.split(comparison.batch_size)])
    return Finding(
        Fidelity.name,
        f"relative logit discrepancy, {pair.title}",
        found.value,
        **judged(found.value, pair.most_discrepancy, (found.low, found.high), len(predictions), at_least=False),
        seed=comparison.seed,
        details={
            **_labels("discrepancy", pair),
            # Eq. 46 is defined per batch; the value above is over all images.
            "per_batch": {
                "size": comparison.batch_size,
                "batches": len(batches),
                "mean": float(batches.mean()),
                "largest": float(batches.max()),
            },
        },
    )


def _agreement(pair: Pair, predictions: Predictions) -> Finding:
    agreeing = int((predictions.classes(pair.base) == predictions.classes(pair.other)).sum())
    share = proportion(agreeing, len(predictions)).scaled(100.0)
    return Finding(
        Fidelity.name,
        f"prediction agreement, {pair.title}",
        share.value,
        "%",
        **judged(share.value, pair.least_agreement, (share.low, share.high), len(predictions), at_least=True),
        details={**_labels("agreement", pair), "agreeing": agreeing},
    )


def _divergence(pair: Pair, predictions: Predictions, seed: int) -> Finding:
    nats = divergence(predictions.logits[pair.base], predictions.logits[pair.other])
    found = mean_estimate(nats, seed)
    return Finding(
        Fidelity.name,
        f"mean KL divergence, {pair.title}",
        found.value,
        "nats",
        low=found.low,
        high=found.high,
        n=len(predictions),
        seed=seed,
        details={**_labels("divergence", pair), "largest": float(nats.max())},
    )


def _labels(quantity: str, pair: Pair) -> dict[str, Any]:
    return {"quantity": quantity, "base": pair.base, "other": pair.other}
