"""The random control: as many directions in every head, but any."""

import hashlib
from dataclasses import dataclass

import torch

from attnrx.diagnosis import Diagnosis
from attnrx.prescription import LayerPrescription
from attnrx.rules.deciding import keep_only
from attnrx.rules.knobs import require_count, require_rule
from attnrx.rules.preconditions import read_spectrum
from attnrx.rules.rule import Rule
from attnrx.rules.selection import largest
from attnrx.shapes import Float, Tensor


@dataclass(frozen=True)
class RandomMatched(Rule):
    """Keeps as many directions of each head as `rule` does, drawn at random; heads that `rule` removes go as well.

    A draw depends on the seed, the layer and the head's number in the original model, and on nothing else.
    Strengths stay as they were, also where `rule` changes them.
    """

    rule: Rule
    seed: int = 0

    def __post_init__(self):
        require_rule(self, self.rule)
        require_count(self, "seed", self.seed)

    def decide(self, diagnosis: Diagnosis, layer: int) -> LayerPrescription:
        """Draws directions for every head."""
        spectrum, matched = read_spectrum(self, diagnosis, layer), self.rule.decide(diagnosis, layer)
        draws = torch.zeros(spectrum.strength.shape, dtype=torch.float64)
        for row, head in zip(draws, spectrum.heads, strict=True):
            row.copy_(self._draw(f"{self.seed}/{layer}/{head}", len(row)))
        keep = largest(draws, spectrum.used, matched.keep.sum(-1))
        return keep_only(spectrum, keep, ["drawn at random"] * len(spectrum.heads), matched.heads)

    def _draw(self, place: str, count: int) -> Float[Tensor, "directions"]:
        seed = int.from_bytes(hashlib.sha256(place.encode()).digest()[:7])
        return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
