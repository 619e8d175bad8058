"""Uniform rank: truncates every head at the same rank (TruncAtt)."""

from dataclasses import dataclass
from typing import ClassVar

from attnrx.diagnosis import Diagnosis
from attnrx.prescription import ScoreDecision
from attnrx.rules.decisions import keep_only, largest
from attnrx.rules.preconditions import read_learned_spectrum, require_count, require_rank
from attnrx.rules.rule import Rule


@dataclass(frozen=True)
class UniformRank(Rule):
    """Keeps the `rank` strongest directions of each head, or that share of its directions (TruncAtt, Section 2.3).

    With the metric "weights" this is the truncated singular value decomposition of each head's W_Q W_K^T. The rank is
    rounded to a `multiple`: kernels load several values at once, and are slower at a rank in between than at the next
    multiple. The default metric is that of TotalRank, except "weights" for scores without norms.
    """

    default_metric: ClassVar[str | None] = "weights"

    rank: int | float
    multiple: int = 1

    def __post_init__(self):
        require_rank(self, "rank", self.rank)
        require_count(self, "multiple", self.multiple, least=1)

    def decide(self, diagnosis: Diagnosis, layer: int) -> ScoreDecision:
        spectrum = read_learned_spectrum(self, diagnosis, layer)
        available = spectrum.used.sum(-1)
        target = available.clamp(max=int(self.rank)) if isinstance(self.rank, int) else self.rank * available
        ranks = ((target / self.multiple).round().long() * self.multiple).minimum(available)
        return keep_only(spectrum, largest(spectrum.strength.abs(), spectrum.used, ranks))
