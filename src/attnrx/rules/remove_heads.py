"""Remove heads: removes a head that is redundant with a kept one, by spectrum and by output."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from attnrx.diagnosis import Diagnosis
from attnrx.maps import HEADS
from attnrx.prescription import ScoreDecision
from attnrx.rules.decisions import keep_only
from attnrx.rules.preconditions import read, read_spectrum, require_share
from attnrx.rules.rule import Rule
from attnrx.shapes import Float, Tensor


@dataclass(frozen=True)
class RemoveHeads(Rule):
    """Removes a head if a kept head has nearly the same spectrum (Eq. 43) and attention output; for the map "heads".

    Equal spectra alone are not sufficient (Proposition 5 requires equal projections too), so both similarities must
    reach their thresholds. Pairs are processed by descending similarity. Of each pair the head with less strength is
    removed, unless another head was removed in its favour; such a head is kept for good, so a layer never loses its
    last head. Removal differs from rank 0: the head's output is gone, and the sum of the pair's outputs is about halved
    until fine-tuning; with `metric=centered` the output projection is refitted instead.
    """

    needs: ClassVar[tuple[str, ...]] = ("spectral_redundancy", "output_similarity")
    applies_to: ClassVar[tuple[str, ...]] = (HEADS,)
    head_metric: ClassVar[str] = "own"

    spectral: float = 0.99
    output: float = 0.95

    def __post_init__(self):
        require_share(self, "spectral", self.spectral)
        require_share(self, "output", self.output)

    def decide(self, diagnosis: Diagnosis, layer: int) -> ScoreDecision:
        spectrum = read_spectrum(self, diagnosis, layer)
        spectral = read(self, diagnosis, layer, "spectral_redundancy", per="pair")
        output = read(self, diagnosis, layer, "output_similarity", per="pair")
        repeats = (spectral >= self.spectral) & (output >= self.output)
        twin = _twins(torch.where(repeats, output, -1.0), spectrum.strength[0].double())
        keep = torch.tensor([[head not in twin for head in range(spectrum.strength.shape[1])]], dtype=torch.bool)
        numbers = [int(head) for head in diagnosis.layers[layer].reading("heads")[0].tolist()]
        return keep_only(spectrum, keep, [_note(numbers, twin, spectral, output)])


def _note(numbers: list[int], twin: dict[int, int], spectral: Tensor, output: Tensor) -> str:
    """Describes the removed heads by their numbers in the original model, or the pair of the most similar outputs."""
    pairs = [(first, second) for first in range(len(numbers)) for second in range(first)]
    if not pairs:
        return "the only head of its layer"
    found = list(twin.items()) or [max(pairs, key=lambda pair: output[pair].item())]
    how = "repeats head {}, which stays" if twin else "is most similar to head {}"
    return "; ".join(
        f"head {numbers[head]} {how.format(numbers[other])}: similarity {spectral[head, other]:.3f} of spectrum and "
        f"{output[head, other]:.3f} of output"
        for head, other in found
    )


def _twins(similarity: Float[Tensor, "heads heads"], total: Float[Tensor, "heads"]) -> dict[int, int]:
    """Returns every removed head with the kept head that it duplicates; of equal strengths the first head stays."""
    pairs = [(a, b) for a in range(len(total)) for b in range(a + 1, len(total)) if similarity[a, b] >= 0]
    twin: dict[int, int] = {}
    for pair in sorted(pairs, key=lambda pair: -similarity[pair].item()):
        weaker, stronger = sorted(pair, key=lambda head: (total[head].item(), -head))
        if weaker in twin.values():  # it is already kept in place of another head
            weaker, stronger = stronger, weaker
        if not {weaker, stronger} & twin.keys() and weaker not in twin.values():
            twin[weaker] = stronger
    return twin
