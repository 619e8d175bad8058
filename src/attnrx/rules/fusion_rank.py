"""Fusion rank: the head ranks of the paper, from the use of shared directions by the heads (IrrAtt)."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from attnrx.decompositions import CorrectionSchedule, cpd_epc, fusion_ranks
from attnrx.decompositions.canonical import STARTS
from attnrx.diagnosis import Diagnosis
from attnrx.errors import UnknownName
from attnrx.prescription import ScoreDecision
from attnrx.rules.decisions import keep_only, largest
from attnrx.rules.metrics import JointForm
from attnrx.rules.preconditions import rank_among, read_learned_spectrum, require_count, require_rank
from attnrx.rules.rule import Rule

METRIC = "augmented"


@dataclass(frozen=True)
class FusionRank(Rule):
    """Keeps as many directions of every head as the fusion matrix of a CP SlimAtt of `rank` terms assigns to it.

    CPD-EPC decomposes the query-key tensor, every term is assigned to the head that uses it most (Algorithm 1), and
    each head keeps that number of the strongest of its own directions. These are block terms with the identity as
    fusion, so no fusion layer is needed. A head never keeps more directions than it has. `start` and `seed` are those
    of the decomposition (see `shared_rank`). The default metric is "augmented".
    """

    default_metric: ClassVar[str | None] = METRIC
    applies_to: ClassVar[tuple[str, ...]] = ("qk",)

    rank: int | float
    sweeps: int = 100
    seed: int = 0
    start: str = "best"

    def __post_init__(self):
        require_rank(self, "rank", self.rank)
        require_count(self, "sweeps", self.sweeps)
        if self.start not in STARTS:
            raise UnknownName("start of fusion_rank", self.start, STARTS)

    def decide(self, diagnosis: Diagnosis, layer: int) -> ScoreDecision:
        spectrum = read_learned_spectrum(self, diagnosis, layer)
        total = rank_among(self.rank, int(spectrum.used.sum()))
        joint = JointForm(diagnosis.layers[layer], self.metric or METRIC)
        schedule = CorrectionSchedule(sweeps=self.sweeps)
        fusion = fusion_ranks(cpd_epc(joint.tensor, total, start=self.start, schedule=schedule, seed=self.seed))
        outside = float(fusion.off_block.mean())
        notes = [
            f"owns {rank} of {total} shared directions, {100 * outside:.1f} % of whose energy lies in other heads"
            for rank in fusion.ranks
        ]
        ranks = torch.tensor(fusion.ranks, dtype=torch.long)
        return keep_only(spectrum, largest(spectrum.strength.abs(), spectrum.used, ranks), notes)
