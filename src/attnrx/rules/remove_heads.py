"""Remove heads: removes a head that is redundant with a kept one, by spectrum and by output."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from attnrx.diagnosis import Diagnosis
from attnrx.prescription import ScoreDecision
from attnrx.rules.decisions import keep_only
from attnrx.rules.preconditions import read, read_spectrum, require_share
from attnrx.rules.rule import Rule
from attnrx.shapes import Float, Tensor
from attnrx.spectrum import Spectrum


@dataclass(frozen=True)
class RemoveHeads(Rule):
    """Removes a head if a kept head has nearly the same spectrum (Eq. 43) and attention output.

    Equal spectra alone are not sufficient (Proposition 5 requires equal projections too), so both similarities must
    reach their thresholds. Pairs are processed by descending similarity. Of each pair the head with less strength is
    removed, unless another head was removed in its favour; such a head is kept for good, so a layer never loses its
    last head. Removal differs from rank 0: the head's output is gone, and the sum of the pair's outputs is about halved
    until fine-tuning.
    """

    needs: ClassVar[tuple[str, ...]] = ("spectral_redundancy", "output_similarity")
    scores_only: ClassVar[bool] = True

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
        twin = _twins(torch.where(repeats, output, -1.0), spectrum)
        heads = torch.tensor([head not in twin for head in range(len(spectrum.heads))], dtype=torch.bool)
        notes = [_note(spectrum, head, twin, spectral, output) for head in range(len(heads))]
        return keep_only(spectrum, spectrum.used & heads[:, None], notes, heads)


def _note(spectrum: Spectrum, head: int, twin: dict[int, int], spectral: Tensor, output: Tensor) -> str:
    others = [other for other in range(len(spectrum.heads)) if other != head]
    if not others:
        return "the only head of its layer"
    other = twin[head] if head in twin else max(others, key=lambda other: output[head, other].item())
    similarity = f"similarity {spectral[head, other]:.3f} of spectrum and {output[head, other]:.3f} of output"
    if head in twin:
        return f"repeats head {spectrum.heads[other]}, which stays: {similarity}"
    return f"nearest to it is head {spectrum.heads[other]}: {similarity}"


def _twins(similarity: Float[Tensor, "heads heads"], spectrum: Spectrum) -> dict[int, int]:
    """Returns every removed head with the kept head that it duplicates."""
    total = spectrum.strength.double().square().mul(spectrum.used).sum(-1)
    pairs = [(a, b) for a in range(len(total)) for b in range(a + 1, len(total)) if similarity[a, b] >= 0]
    twin: dict[int, int] = {}
    for pair in sorted(pairs, key=lambda pair: -similarity[pair].item()):
        weaker, stronger = sorted(pair, key=lambda head: (total[head].item(), -head))
        if weaker in twin.values():  # it is already kept in place of another head
            weaker, stronger = stronger, weaker
        if not {weaker, stronger} & twin.keys() and weaker not in twin.values():
            twin[weaker] = stronger
    return twin
