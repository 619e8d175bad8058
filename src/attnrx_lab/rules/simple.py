"""Rarely needed rules for single layers: median and soft thresholds, caps, contribution energy, uniform attention."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from attnrx.decide.rules.rule import Rule, fewest_holding, give_strengths, keep_only, learned_spectrum
from attnrx.nouns.diagnosis import Diagnosis
from attnrx.nouns.prescription import ScoreDecision
from attnrx.support.arguments import POSITIVE, Kind


@dataclass(frozen=True)
class MedianThreshold(Rule):
    """Keeps the directions whose |strength| is above `factor` times the head's median (Gavish and Donoho, 2014).

    For a square low-rank matrix plus white noise of unknown level, 2.858 times the median singular value is the
    threshold with the least asymptotic mean squared error. So the default factor needs no tuning. A head with a slowly
    decaying spectrum may keep no direction. The rule needs learned strengths, or a `metric` for rewriting the scores.
    """

    kinds: ClassVar[Mapping[str, Kind]] = {"factor": POSITIVE}

    factor: float = 2.858

    def decide(self, diagnosis: Diagnosis, layer: int) -> ScoreDecision:
        spectrum = learned_spectrum(self, diagnosis, layer)
        strength = spectrum.strength.double().abs()
        # `median` would return the lower of two middle values. The padding is NaN, because it must not count.
        median = strength.where(spectrum.used, torch.nan).nanquantile(0.5, dim=1, keepdim=True)
        reasons = [f"above {self.factor:g} times the median {value:.3g}" for value in median.flatten().tolist()]
        return keep_only(spectrum, strength > self.factor * median, reasons)


@dataclass(frozen=True)
class Shrinkage(Rule):
    """Subtracts `amount` from every |strength| (soft threshold), and removes directions that reach zero.

    A head may keep no direction. In the masked model, no score changes by more than amount * scale (SVDA, Theorem 1).
    `Threshold` has the same error bound, but with `Shrinkage` the new strengths are a continuous function of `amount`.
    The rule needs learned strengths.
    """

    applies_to: ClassVar[tuple[str, ...]] = ("qk",)
    kinds: ClassVar[Mapping[str, Kind]] = {"amount": POSITIVE}

    amount: float

    def decide(self, diagnosis: Diagnosis, layer: int) -> ScoreDecision:
        spectrum = learned_spectrum(self, diagnosis, layer)
        strength = spectrum.strength.double() * spectrum.used
        magnitude = (strength.abs() - self.amount).clamp(min=0)
        notes = [f"every strength shrunk by {self.amount:g}"] * strength.shape[0]
        return give_strengths(spectrum, magnitude > 0, magnitude * strength.sign(), notes)


@dataclass(frozen=True)
class NormClip(Rule):
    """Caps |strength| at `limit`, and keeps every direction (spectral smoothing).

    The limit is absolute, not relative to the head's largest strength. So the scores, as a function of queries and
    keys, have a Lipschitz constant of at most limit * scale (SVDA, Proposition 4). The rule needs learned strengths.
    """

    applies_to: ClassVar[tuple[str, ...]] = ("qk",)
    kinds: ClassVar[Mapping[str, Kind]] = {"limit": POSITIVE}

    limit: float

    def decide(self, diagnosis: Diagnosis, layer: int) -> ScoreDecision:
        spectrum = learned_spectrum(self, diagnosis, layer)
        strength = spectrum.strength.double() * spectrum.used
        notes = [f"{int((row > self.limit).sum())} of them capped at {self.limit:g}" for row in strength.abs()]
        return give_strengths(spectrum, spectrum.used, strength.clamp(-self.limit, self.limit), notes)


@dataclass(frozen=True)
class ContributionEnergy(Rule):
    """Keeps the fewest directions of each head that retain the share rho of its contribution energy.

    The contribution energy of a direction is strength^2 * query_moment * key_moment, which is the mean square of its
    term in the scores. The keys are centred over the tokens of an image, because the softmax cancels constants along a
    row. The rule resolves ties by index and keeps at least one direction, like `EnergyRetention`. The rule works for
    every form of attention, including dense attention. The error has no bound, because terms of different directions
    may cancel.
    """

    applies_to: ClassVar[tuple[str, ...]] = ("qk",)

    rho: float

    def decide(self, diagnosis: Diagnosis, layer: int) -> ScoreDecision:
        spectrum = diagnosis.layers[layer].spectrum
        query, key = (diagnosis.layers[layer].reading(f"{side}_moment").double() for side in ("query", "key"))
        amount = spectrum.strength.double().square() * query * key * spectrum.used
        keep = fewest_holding(self.rho, amount, spectrum.used)
        # With the clamp, the share of a head without contribution is 0.
        shares = (amount * keep).sum(-1) / amount.sum(-1).clamp_min(torch.finfo(amount.dtype).tiny)
        return keep_only(spectrum, keep, [f"{100 * share:.1f} % of the contribution" for share in shares.tolist()])


@dataclass(frozen=True)
class UniformHeads(Rule):
    """Removes all score directions of heads whose selectivity is at most `selectivity`.

    A head without directions averages the values of all tokens. Selectivity is 1 - row entropy / log(tokens), averaged
    over the calibration images. It is 0 for uniform attention. By Pinsker's inequality, a head's attention rows differ
    from uniform rows on average by at most sqrt(2 * selectivity * log(tokens)) in the 1-norm. So the error on the
    calibration images is bounded. The rule works for every form of attention, including dense attention.
    """

    applies_to: ClassVar[tuple[str, ...]] = ("qk",)

    selectivity: float = 1e-3

    def decide(self, diagnosis: Diagnosis, layer: int) -> ScoreDecision:
        found = diagnosis.layers[layer]
        spectrum, selectivity = found.spectrum, found.reading("selectivity").double()
        keep = spectrum.used & (selectivity > self.selectivity)[:, None]
        return keep_only(spectrum, keep, [f"selectivity {value:.2g}" for value in selectivity.tolist()])
