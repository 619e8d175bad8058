"""The destructive control: as many directions in every head, but the weakest."""

from dataclasses import dataclass

from attnrx.diagnosis import Diagnosis
from attnrx.prescription import ScoreDecision
from attnrx.rules.decisions import keep_only
from attnrx.rules.knobs import require_rule
from attnrx.rules.preconditions import read_learned_spectrum, require_own_directions
from attnrx.rules.rule import Rule
from attnrx.rules.selection import places


@dataclass(frozen=True)
class LargestMatched(Rule):
    """Removes as many directions of each head as `rule` does, the strongest first; heads it removes go as well.

    If the spectrum ranks directions rightly this does more harm than `rule`. Strengths stay as they were. Needs
    learned strengths.
    """

    rule: Rule

    def __post_init__(self):
        require_rule(self, self.rule)

    def decide(self, diagnosis: Diagnosis, layer: int) -> ScoreDecision:
        """Turns the order of the strengths round."""
        spectrum, matched = read_learned_spectrum(self, diagnosis, layer), self.rule.decide(diagnosis, layer)
        require_own_directions(self, spectrum, matched)
        removed = spectrum.used.sum(-1) - matched.keep.sum(-1)
        keep = places(spectrum.strength.abs(), spectrum.used) >= removed[:, None]
        return keep_only(spectrum, keep, ["the weakest"] * len(spectrum.heads), matched.heads)
