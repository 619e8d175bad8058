"""Rules from the SVDA paper: thresholds, ranks per head, the effective rank, and the removal of redundant heads."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from attnrx.decide import diagnostics
from attnrx.decide.rules.rule import Rule, keep_only, largest, learned_spectrum
from attnrx.nouns.diagnosis import Diagnosis
from attnrx.nouns.prescription import ScoreDecision
from attnrx.support.arguments import POSITIVE, Kind
from attnrx.support.shapes import Float, Tensor
from attnrx.vit.maps import HEADS

ROUNDING = 1e-9  # exp(log(10)) is above 10 in floating point, but its ceiling must not be 11


@dataclass(frozen=True)
class Threshold(Rule):
    """Keeps the directions with |strength| >= tau (SVDA, Eqs. 8-10). A head may keep no direction.

    In the masked model, no score changes by more than tau * scale (Theorem 1, Eq. 13). The rule needs learned
    strengths.
    """

    kinds: ClassVar[Mapping[str, Kind]] = {"tau": POSITIVE}

    tau: float

    def decide(self, diagnosis: Diagnosis, layer: int) -> ScoreDecision:
        spectrum = learned_spectrum(self, diagnosis, layer)
        return keep_only(spectrum, spectrum.strength.double().abs() >= self.tau)


@dataclass(frozen=True)
class TopRank(Rule):
    """Keeps the `rank` strongest directions of each head, or all if a head has fewer. Ties are resolved by index.

    By SVDA's Theorem 1, no other choice of `rank` directions has a smaller bound on the error of the masked scores. The
    rule needs learned strengths.
    """

    rank: int

    def decide(self, diagnosis: Diagnosis, layer: int) -> ScoreDecision:
        spectrum = learned_spectrum(self, diagnosis, layer)
        ranks = torch.full((spectrum.strength.shape[0],), self.rank)
        return keep_only(spectrum, largest(spectrum.strength.abs(), spectrum.used, ranks))


@dataclass(frozen=True)
class EffectiveRank(Rule):
    """Reduces each head to its effective rank (SVDA, Eq. 24), rounded up, and keeps the strongest directions.

    If all strengths of a head are zero, its effective rank is 0. The head then keeps no direction, which does not
    change the model. The rule needs learned strengths.
    """

    def decide(self, diagnosis: Diagnosis, layer: int) -> ScoreDecision:
        spectrum = learned_spectrum(self, diagnosis, layer)
        effective = diagnostics.effective_rank(spectrum.strength.double(), spectrum.used)
        keep = largest(spectrum.strength.abs(), spectrum.used, (effective - ROUNDING).ceil().long())
        return keep_only(spectrum, keep, [f"effective rank {rank:.3g}" for rank in effective.tolist()])


@dataclass(frozen=True)
class RemoveHeads(Rule):
    """Removes a head if a kept head has nearly the same spectrum (SVDA, Eq. 43) and attention output.

    Use this rule for the map "heads". Similar spectra are not sufficient, because Proposition 5 also requires equal
    projections. So the similarity of the spectra and the similarity of the outputs must both reach their thresholds.
    The rule processes pairs of similar heads in order of descending output similarity, and skips pairs with a removed
    head. From each pair, it removes the head whose total strength is smaller. If this head already replaces a removed
    head, the stronger head of the pair is removed instead. A head that replaces another head is never removed, so a
    layer never loses its last head. A removed head outputs nothing, whereas a head of rank 0 still averages its values.
    So without fine-tuning, the sum of the pair's outputs is about halved. With `metric=centered` the output projection
    is refitted to compensate.
    """

    applies_to: ClassVar[tuple[str, ...]] = (HEADS,)
    head_metric: ClassVar[str] = "own"

    spectral: float = 0.99
    output: float = 0.95

    def decide(self, diagnosis: Diagnosis, layer: int) -> ScoreDecision:
        # For "heads" a layer is one unit and its directions are its heads (`decide_heads`), so strength is [1, heads].
        spectrum = diagnosis.layers[layer].spectrum
        spectral, output = (
            diagnosis.layers[layer].reading(name).double() for name in ("spectral_redundancy", "output_similarity")
        )
        repeats = (spectral >= self.spectral) & (output >= self.output)
        twin = _twins(torch.where(repeats, output, -1.0), spectrum.strength[0].double())
        keep = torch.tensor([[head not in twin for head in range(spectrum.strength.shape[1])]], dtype=torch.bool)
        # The heads' numbers in the original model, counted from 1.
        names = [int(head) + 1 for head in diagnosis.layers[layer].reading("heads")[0].tolist()]
        pairs = [
            f"head {names[head]} repeats head {names[other]}, which stays: similarity {spectral[head, other]:.3f} of "
            f"spectrum and {output[head, other]:.3f} of output"
            for head, other in twin.items()
        ]
        return keep_only(spectrum, keep, ["; ".join(pairs) or "no head repeats another"])


def _twins(similarity: Float[Tensor, "heads heads"], total: Float[Tensor, "heads"]) -> dict[int, int]:
    """Maps every removed head to the similar head that replaces it. If strengths are equal, the first head stays."""
    # The similarity is -1 for pairs that do not repeat each other.
    pairs = [(a, b) for a in range(len(total)) for b in range(a + 1, len(total)) if similarity[a, b] >= 0]
    twin: dict[int, int] = {}
    for pair in sorted(pairs, key=lambda pair: -similarity[pair].item()):
        weaker, stronger = sorted(pair, key=lambda head: (total[head].item(), -head))
        if weaker in twin.values():  # this head already replaces another head
            weaker, stronger = stronger, weaker
        if not {weaker, stronger} & twin.keys() and weaker not in twin.values():
            twin[weaker] = stronger
    return twin
