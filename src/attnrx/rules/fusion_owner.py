"""Fusion owner: assigns every shared direction to the one head that uses it most (IrrAtt from a CP SlimAtt)."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from attnrx.decompositions import Canonical, fusion_ranks
from attnrx.diagnosis import Diagnosis
from attnrx.errors import NotSupported
from attnrx.prescription import ScoreDecision
from attnrx.rules.decisions import keep_only
from attnrx.rules.preconditions import read_spectrum
from attnrx.rules.rule import Rule


@dataclass(frozen=True)
class FusionOwner(Rule):
    """Converts a CP SlimAtt, trained or not, into irregular attention (Section 3.1, Eqs. 5 and 6).

    Every head keeps the shared directions in which it has the largest strength of all heads, and loses the others. This
    is exact where every column of the fusion matrix has one nonzero value, as training with `fusion_ownership` and
    `nonnegative_fusion` produces. The directions themselves do not change.
    """

    applies_to: ClassVar[tuple[str, ...]] = ("qk",)

    def decide(self, diagnosis: Diagnosis, layer: int) -> ScoreDecision:
        spectrum = read_spectrum(self, diagnosis, layer)
        heads = len(spectrum.heads)
        if not spectrum.shared or heads < 2:
            found = "the heads" if heads > 1 else "the one head"
            whose = "its shared directions to itself" if spectrum.shared else "directions of its own"
            raise NotSupported(
                f"{self} gives each shared direction to one of several heads, and {found} of layer {layer} has "
                f"{whose}; use fusion_rank, total_rank or uniform_rank."
            )
        left, right = (table[0].double().mT for table in (spectrum.query, spectrum.key))
        fusion = fusion_ranks(Canonical(left, right, spectrum.strength.double()))
        keep = fusion.owner == torch.arange(heads)[:, None]
        notes = []
        for head in range(heads):
            mean = float(fusion.off_block[keep[head]].mean()) if keep[head].any() else 0.0
            notes.append(f"owns those, {100 * mean:.1f} % of whose energy lies in other heads")
        return keep_only(spectrum, keep, notes)
