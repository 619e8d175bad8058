"""Applies a separate rule to every layer."""

from dataclasses import dataclass

from attnrx.diagnosis import Diagnosis
from attnrx.errors import InvalidRule
from attnrx.prescription import ScoreDecision
from attnrx.rules.rule import Rule


@dataclass(frozen=True)
class ByLayer(Rule):
    """Applies a separate rule to every layer, the first rule to the first layer.

    A target per layer resolves to this rule: the rank that meets the target differs from layer to layer. As text:
    by_layer(total_rank:0.5; total_rank:0.25).
    """

    rules: tuple[Rule, ...]

    def __post_init__(self):
        object.__setattr__(self, "rules", tuple(self.rules))
        if not self.rules or not all(isinstance(rule, Rule) for rule in self.rules):
            raise InvalidRule(f"by_layer was given {self.rules!r}: give one rule for each layer.")

    def decide(self, diagnosis: Diagnosis, layer: int) -> ScoreDecision:
        """Applies the rule of this layer."""
        if len(self.rules) != len(diagnosis.layers):
            raise InvalidRule(
                f"by_layer has {len(self.rules)} rules for {len(diagnosis.layers)} layers: give one each."
            )
        return self.rules[layer].decide(diagnosis, layer)
