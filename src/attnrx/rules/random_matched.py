"""The random control: keeps the same number of directions of every head, drawn at random."""

import hashlib
from dataclasses import dataclass

import torch

from attnrx.diagnosis import Diagnosis
from attnrx.prescription import Basis, ScoreDecision
from attnrx.rules.decisions import keep_only, largest
from attnrx.rules.preconditions import read_spectrum, require_count, require_rule
from attnrx.rules.rule import Rule
from attnrx.shapes import Float, Tensor
from attnrx.spectrum import Spectrum


@dataclass(frozen=True)
class RandomMatched(Rule):
    """Keeps as many directions of each head as `rule` does, drawn at random.

    A draw depends only on the seed, the layer and the head's index in the original model. Strengths do not change, even
    where `rule` changes them.

    Of directions that all heads share, those of the model are permuted, so that the total number and the number used by
    each head are the same. A rule that creates shared directions is matched by as many directions of random heads, in
    the same form.
    """

    rule: Rule
    seed: int = 0

    def __post_init__(self):
        require_rule(self, self.rule)
        require_count(self, "seed", self.seed)

    def decide(self, diagnosis: Diagnosis, layer: int) -> ScoreDecision:
        spectrum, matched = read_spectrum(self, diagnosis, layer), self.rule.decide(diagnosis, layer)
        if matched.is_shared:
            return self._shared(spectrum, matched, layer)
        if spectrum.shared:
            order = self._draw(f"{self.seed}/{layer}", matched.keep.shape[1]).argsort()
            return keep_only(spectrum, matched.keep[:, order], self._notes(spectrum))
        scores = torch.zeros(spectrum.strength.shape, dtype=torch.float64)
        for row, head in zip(scores, spectrum.heads, strict=True):
            row.copy_(self._draw(f"{self.seed}/{layer}/{head}", len(row)))
        keep = largest(scores, spectrum.used, matched.keep.sum(-1))
        return keep_only(spectrum, keep, self._notes(spectrum))

    @staticmethod
    def _notes(spectrum: Spectrum) -> list[str]:
        return ["drawn at random"] * len(spectrum.heads)

    def _shared(self, spectrum: Spectrum, matched: ScoreDecision, layer: int) -> ScoreDecision:
        """Draws as many of the heads' own directions as `matched` shares; each is used by its original head only."""
        heads, directions = spectrum.strength.shape
        rank, used = matched.keep.shape[1], torch.nonzero(spectrum.used.flatten()).flatten()
        sample = used[self._draw(f"{self.seed}/{layer}", len(used)).argsort()[:rank].sort().values]
        rows = torch.zeros(1, rank, heads * directions, dtype=torch.float64)
        rows[0, torch.arange(len(sample)), sample] = 1.0
        strength = torch.zeros(heads, rank, dtype=torch.float64)
        strength[sample // directions, torch.arange(len(sample))] = spectrum.strength.flatten()[sample].double()
        why = f"shares {rank} directions with all heads of the layer (drawn at random)"
        basis = Basis(rows, rows, shared=True)
        return ScoreDecision(matched.keep, strength, (why,) * heads, basis)

    def _draw(self, key: str, count: int) -> Float[Tensor, "directions"]:
        seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:7])
        return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
