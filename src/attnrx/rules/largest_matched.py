"""The destructive control: keeps the same number of directions of every head, the weakest ones."""

from dataclasses import dataclass

from attnrx.diagnosis import Diagnosis
from attnrx.prescription import ScoreDecision
from attnrx.rules.decisions import keep_only, rank_positions
from attnrx.rules.preconditions import read_learned_spectrum, require_own_directions, require_rule
from attnrx.rules.rule import Rule


@dataclass(frozen=True)
class LargestMatched(Rule):
    """Removes as many directions of each head as `rule` does, the strongest first.

    If the spectrum ranks directions correctly, this degrades the model more than `rule`. Strengths do not change. Needs
    learned strengths.
    """

    rule: Rule

    def __post_init__(self):
        require_rule(self, self.rule)

    def decide(self, diagnosis: Diagnosis, layer: int) -> ScoreDecision:
        spectrum, matched = read_learned_spectrum(self, diagnosis, layer), self.rule.decide(diagnosis, layer)
        require_own_directions(self, spectrum, matched)
        removed = spectrum.used.sum(-1) - matched.keep.sum(-1)
        keep = rank_positions(spectrum.strength.abs(), spectrum.used) >= removed[:, None]
        return keep_only(spectrum, keep, ["the weakest"] * len(spectrum.heads))
