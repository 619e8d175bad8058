"""The interface of a rule, and the two combinations of rules."""

import dataclasses
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from attnrx.diagnosis import Diagnosis
from attnrx.errors import InvalidRule
from attnrx.maps import LAYER_MAPS
from attnrx.prescription import ScoreDecision
from attnrx.rules.decisions import give_strengths
from attnrx.shapes import Float, Int, Tensor


@dataclass(frozen=True, kw_only=True)
class Rule(ABC):
    """Decides which directions of a map are kept, layer by layer.

    Every rule is a frozen dataclass whose fields are its knobs. `metric` is the metric of the directions (METRICS for
    the scores, OUTPUT_METRICS for other maps); None is its default. `needs` lists the readings that it uses in addition
    to the spectrum. `a & b` keeps the intersection, `a | b` the union, and `parse_rule(str(rule))` returns an equal
    rule.
    """

    metric: str | None = None

    needs: ClassVar[tuple[str, ...]] = ()
    default_metric: ClassVar[str | None] = None
    """The default metric for scores without norms."""
    applies_to: ClassVar[tuple[str, ...]] = LAYER_MAPS
    """The maps that it can decide about; ("qk",) where it uses attention, changeable strengths or shared directions."""
    head_metric: ClassVar[str] = "centered"
    """The default metric for "heads" (HEAD_METRICS)."""

    @abstractmethod
    def decide(self, diagnosis: Diagnosis, layer: int) -> ScoreDecision:
        """Returns the kept directions of one layer, their strengths, and the reasons."""

    def __and__(self, other: "Rule") -> "And":
        return And((self, other))

    def __or__(self, other: "Rule") -> "Or":
        return Or((self, other))

    def __str__(self) -> str:
        return _spell(self)


@dataclass(frozen=True)
class And(Rule):
    """Keeps the directions that all of its rules keep, with the smallest strength of them."""

    rules: tuple[Rule, ...]

    def __post_init__(self):
        object.__setattr__(self, "rules", _flat(And, self.rules))

    def decide(self, diagnosis: Diagnosis, layer: int) -> ScoreDecision:
        """Returns the intersection of the decisions."""
        decisions = [rule.decide(diagnosis, layer) for rule in self.rules]
        keep = torch.stack([decision.keep for decision in decisions]).all(0)
        strengths = torch.stack([decision.strength for decision in decisions])
        strength = _select(strengths, strengths.abs().argmin(0))
        own = give_strengths(diagnosis.layers[layer].spectrum, keep, strength)
        return replace(own, reasons=_reasons(own, "All of", self.rules, decisions))


@dataclass(frozen=True)
class Or(Rule):
    """Keeps the directions that any of its rules keeps, with the largest strength of them."""

    rules: tuple[Rule, ...]

    def __post_init__(self):
        object.__setattr__(self, "rules", _flat(Or, self.rules))

    def decide(self, diagnosis: Diagnosis, layer: int) -> ScoreDecision:
        """Returns the union of the decisions."""
        decisions = [rule.decide(diagnosis, layer) for rule in self.rules]
        keep = torch.stack([decision.keep for decision in decisions]).any(0)
        strengths = torch.stack([decision.strength for decision in decisions])
        strength = _select(strengths, strengths.abs().argmax(0))
        own = give_strengths(diagnosis.layers[layer].spectrum, keep, strength)
        return replace(own, reasons=_reasons(own, "Any of", self.rules, decisions))


def rule_name(kind: type[Rule]) -> str:
    """Returns the name of a rule in text: `EnergyRetention` is `energy_retention`."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower()


def inner_rules(rule: Rule) -> tuple[Rule, ...]:
    """Returns the rules that are fields of a rule."""
    values = [getattr(rule, field.name) for field in option_fields(type(rule))]
    flat = [item for value in values for item in (value if isinstance(value, tuple) else (value,))]
    return tuple(item for item in flat if isinstance(item, Rule))


def readings_needed(rule: Rule) -> tuple[str, ...]:
    """Returns the readings that a rule and its parts need, without duplicates."""
    names = [*rule.needs, *(name for part in inner_rules(rule) for name in readings_needed(part))]
    return tuple(dict.fromkeys(names))


def metric_of(rule: Rule, *, defaults: bool = False) -> str | None:
    """Returns the metric that a rule and its parts state, None for none; with `defaults`, the default of each part.

    Raises:
        InvalidRule: Parts have different metrics; their directions cannot be combined.
    """
    own = rule.default_metric if rule.metric is None and defaults else rule.metric
    parts = (metric_of(part, defaults=defaults) for part in inner_rules(rule))
    requested = {metric for metric in (own, *parts) if metric is not None}
    if len(requested) > 1:
        raise InvalidRule(f"{rule} decides in the metrics {' and '.join(sorted(requested))}; give all parts the same.")
    return next(iter(requested), None)


def in_metric(rule: Rule, metric: str) -> Rule:
    """Returns the rule with its metric stated, in each of its parts where it has parts."""
    fields = {field.name: getattr(rule, field.name) for field in option_fields(type(rule))}
    held = {name: value for name, value in fields.items() if isinstance(value, Rule | tuple)}
    if not held:
        return replace(rule, metric=metric)
    changed = {
        name: in_metric(value, metric) if isinstance(value, Rule) else tuple(in_metric(part, metric) for part in value)
        for name, value in held.items()
    }
    return replace(rule, metric=None, **changed)


def _flat(kind: type[Rule], rules: Sequence[Any]) -> tuple[Rule, ...]:
    """Flattens nested combinations of the same kind, so that (a & b) & c equals a & (b & c)."""
    wrong = [rule for rule in rules if not isinstance(rule, Rule)]
    if wrong or len(rules) < 2:
        raise InvalidRule(
            f"{kind.__name__}({rules!r}): give at least two rules, e.g. And((Threshold(0.1), TopRank(8)))."
        )
    return tuple(part for rule in rules for part in (inner_rules(rule) if isinstance(rule, kind) else (rule,)))


def _select(
    strengths: Float[Tensor, "rules heads directions"], indices: Int[Tensor, "heads directions"]
) -> Float[Tensor, "heads directions"]:
    return strengths.gather(0, indices[None])[0]


def _reasons(
    own: ScoreDecision, how: str, rules: Sequence[Rule], decisions: Sequence[ScoreDecision]
) -> tuple[str, ...]:
    each = zip(*(decision.reasons for decision in decisions), strict=True)
    return tuple(
        f"{reason}. {how}: " + "; ".join(f"[{rule}] {part}" for rule, part in zip(rules, parts, strict=True))
        for reason, parts in zip(own.reasons, each, strict=True)
    )


def _spell(rule: Rule) -> str:
    if isinstance(rule, And):
        return " & ".join(f"({part})" if isinstance(part, Or) else str(part) for part in rule.rules)
    if isinstance(rule, Or):
        return " | ".join(str(part) for part in rule.rules)
    parts = "; ".join(str(part) for part in inner_rules(rule))
    return rule_name(type(rule)) + (f"({parts})" if parts else "") + _spell_knobs(rule)


def _spell_knobs(rule: Rule) -> str:
    """Returns the knobs: those without a default by position, the others by name where they differ from it."""
    knobs = []
    for field in option_fields(type(rule)):
        value = getattr(rule, field.name)
        if field.default is not dataclasses.MISSING and value != field.default:
            knobs.append(f"{field.name}={value}" if isinstance(value, str) else f"{field.name}={value!r}")
        elif field.default is dataclasses.MISSING and not isinstance(value, Rule | tuple):
            knobs.append(repr(value))
    return ":" + ",".join(knobs) if knobs else ""


def option_fields(kind: type[Rule]) -> tuple["dataclasses.Field[Any]", ...]:
    """Returns the fields of a rule, keyword-only ones last."""
    return tuple(sorted(dataclasses.fields(kind), key=lambda field: bool(field.kw_only)))
