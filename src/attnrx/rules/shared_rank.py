"""Shared directions: one set for all heads, used by each head with its own strengths (CP SlimAtt)."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from attnrx.decompositions import BlockTerms, Canonical, CorrectionSchedule, block_terms, cpd_epc
from attnrx.decompositions.canonical import STARTS, als
from attnrx.diagnosis import Diagnosis
from attnrx.errors import UnknownName
from attnrx.prescription import Basis, ScoreDecision
from attnrx.rules.metrics import JointForm
from attnrx.rules.preconditions import rank_among, read_spectrum, require_count, require_rank
from attnrx.rules.rule import Rule

FORMS = ("cp", "epc", "tied", "warm", "literal")


@dataclass(frozen=True)
class SharedRank(Rule):
    """Rewrites a layer's scores in `rank` directions that all heads share (Eqs. 3 and 4), an integer or a share of
    them.

    `form` is the decomposition of the query-key tensor: "cp" by alternating least squares, "epc" with the correction
    that bounds the size of the terms (CPD-EPC), or block terms (BTD-(L, L, 1), whose directions form blocks with one
    strength pattern each): "tied" improves all blocks at once, "warm" and "literal" one after the other, the latter as
    Algorithms 1 to 3 are printed. `start` initializes the iterations (STARTS): "best" tries water-filling and random
    terms, drawn from `seed`, and keeps the one with the smaller error. `joint` is the metric (JOINT_METRICS). No
    direction is removed afterwards.
    """

    applies_to: ClassVar[tuple[str, ...]] = ("qk",)

    rank: int | float
    form: str = "epc"
    joint: str = "augmented"
    sweeps: int = 100
    seed: int = 0
    start: str = "best"

    def __post_init__(self):
        require_rank(self, "rank", self.rank)
        require_count(self, "sweeps", self.sweeps)
        if self.form not in FORMS:
            raise UnknownName("form of shared_rank", self.form, FORMS)
        if self.start not in STARTS:
            raise UnknownName("start of shared_rank", self.start, STARTS)

    def decide(self, diagnosis: Diagnosis, layer: int) -> ScoreDecision:
        spectrum = read_spectrum(self, diagnosis, layer)
        form = JointForm(diagnosis.layers[layer], self.joint)
        rank = rank_among(self.rank, int(spectrum.used.sum()))
        terms = self._decompose(form, rank)
        left, right = form.basis(terms.left, terms.right)
        error = form.tensor.relative_error(terms.left, terms.right, terms.mix)
        heads = len(spectrum.heads)
        why = f"shares {rank} directions with all heads of the layer; relative error of the form {error:.3g}"
        keep = torch.ones(heads, rank, dtype=torch.bool)
        return ScoreDecision(keep, terms.mix, (why,) * heads, Basis(left, right, shared=True))

    def _decompose(self, form: JointForm, rank: int) -> Canonical:
        options: dict[str, Any] = {"start": self.start, "seed": self.seed}
        if self.form == "cp":
            return als(form.tensor, rank, sweeps=self.sweeps, **options)
        schedule = CorrectionSchedule(sweeps=self.sweeps, finish=True)
        if self.form == "epc":
            return cpd_epc(form.tensor, rank, schedule=schedule, **options)
        found: BlockTerms = block_terms(form.tensor, rank, form=self.form, schedule=schedule, **options)
        return found.canonical
