"""Rules with one open share: their texts, costs and smallest share."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from attnrx.decide.planning.cost_table import prescribed_costs
from attnrx.decide.rules import parse_rules, prescribe_maps, split_maps
from attnrx.nouns.diagnosis import Diagnosis
from attnrx.nouns.prescription import TokenPrescription
from attnrx.support.errors import InvalidInput, NoOpPrescription
from attnrx.vit.costs import ModelCosts
from attnrx.vit.maps import TOKENS
from attnrx.vit.models import family_of
from attnrx.vit.tokens import parse_policy
from attnrx_lab.baselines.shares import GRID, largest_share

SHARE = "{share}"


@dataclass(frozen=True)
class Template:
    """The rule texts by map, with the placeholder {share} for one common share.

    For example "qk=total_rank:{share} fc1=uniform_rank:{share}".
    """

    texts: Mapping[str, str]

    @classmethod
    def parse(cls, text: str) -> "Template":
        """Parses the rules of several maps from one text."""
        return cls(split_maps(text))

    @property
    def has_token_share(self) -> bool:
        """Whether the share also applies to the tokens."""
        return SHARE in self.texts.get(TOKENS, "")

    @property
    def varies(self) -> bool:
        """Whether any rule depends on the share."""
        return any(SHARE in text for text in self.texts.values())

    def at(self, share: float) -> dict[str, str]:
        """Returns the texts with one share inserted."""
        return {name: text.replace(SHARE, repr(share)) for name, text in self.texts.items()}


def least_share(model: nn.Module, template: Template) -> float:
    """Returns the smallest share that can be prescribed; a share of tokens must keep at least one patch."""
    if not template.has_token_share:
        return 1 / GRID
    family = family_of(model)
    layout, depth = family.token_layout(model), len(family.attention(model))
    _policy(template, 1.0, model)  # raises for errors that do not depend on the share

    def is_too_small(share: float) -> bool:
        try:
            parse_policy(template.at(share)[TOKENS]).require(layout, depth)
        except InvalidInput:
            return True
        return False

    # Being too small is monotone like a cost: the smallest share that can be prescribed is one step above.
    largest = largest_share(is_too_small)
    return 1 / GRID if largest is None else largest + 1 / GRID


def costs_at(model: nn.Module, diagnosis: Diagnosis, template: Template, share: float) -> ModelCosts:
    """Returns the costs at one share of the template; for a no-op prescription those of the unchanged model."""
    rules, _ = parse_rules(template.at(share))
    try:
        prescription = prescribe_maps(diagnosis, {**rules, TOKENS: _policy(template, share, model)})
    # Near a share of 1 the rules may keep everything, which `prescribe_maps` refuses; the bisection needs a cost there.
    except NoOpPrescription:
        return family_of(model).costs(model)
    return prescribed_costs(model, prescription)


def _policy(template: Template, share: float, model: nn.Module) -> TokenPrescription | None:
    _, tokens = parse_rules({TOKENS: template.at(share).get(TOKENS)})
    if tokens is not None:
        family = family_of(model)
        tokens.policy.on(family.token_layout(model), len(family.attention(model)))  # for its errors
    return tokens
