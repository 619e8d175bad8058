"""The interface of a rule, the combinations of rules, and what rules read of a diagnosis."""

import dataclasses
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from attnrx.decide.rules.decisions import give_strengths
from attnrx.nouns.diagnosis import Diagnosis
from attnrx.nouns.prescription import ScoreDecision
from attnrx.support.arguments import COUNT, NATURAL, SHARE, Kind, each, either, instance, require_fields
from attnrx.support.errors import InvalidInput, InvalidRule, NotSupported
from attnrx.support.text_parsing import knobs_of
from attnrx.vit.maps import LAYER_MAPS
from attnrx.vit.spectrum import Spectrum

RULE = "a rule, e.g. EnergyRetention(0.9)"


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
    kinds: ClassVar[Mapping[str, Kind]] = {}
    """The kinds of its knobs, where they are not those of their types: natural numbers, shares, rules."""

    def __post_init__(self):
        by_type = {
            int: NATURAL,
            float: SHARE,
            int | float: either(
                "a whole number of directions, or a share above 0, at most 1, e.g. 0.5", NATURAL, SHARE
            ),
            Rule: instance(RULE, Rule),
            tuple[Rule, ...]: each(instance(RULE, Rule), "a tuple of rules", least=1),
        }
        kinds = {name: by_type[knob.type] for name, knob in knobs_of(type(self), Rule).items() if knob.type in by_type}
        multiple = {"multiple": COUNT} if "multiple" in kinds else {}
        try:
            require_fields(self, **{**kinds, **multiple, **self.kinds})
        except InvalidInput as error:
            raise InvalidRule(str(error)) from None

    @abstractmethod
    def decide(self, diagnosis: Diagnosis, layer: int) -> ScoreDecision:
        """Returns the kept directions of one layer, their strengths, and the reasons."""

    def __and__(self, other: "Rule") -> "And":
        return And((self, other))

    def __or__(self, other: "Rule") -> "Or":
        return Or((self, other))

    def __str__(self) -> str:
        parts = "; ".join(str(part) for part in inner_rules(self))
        return rule_name(type(self)) + (f"({parts})" if parts else "") + _spell_knobs(self)


@dataclass(frozen=True)
class Combination(Rule):
    """Several rules that decide about the same directions."""

    rules: tuple[Rule, ...]

    how: ClassVar[str]
    sign: ClassVar[str]

    def __post_init__(self):
        super().__post_init__()
        # Flat, so that (a & b) & c equals a & (b & c).
        nested = (inner_rules(rule) if type(rule) is type(self) else (rule,) for rule in self.rules)
        object.__setattr__(self, "rules", tuple(part for parts in nested for part in parts))

    def __str__(self) -> str:
        # & binds more tightly than |.
        return self.sign.join(
            f"({part})" if isinstance(self, And) and isinstance(part, Or) else str(part) for part in self.rules
        )

    def decide(self, diagnosis: Diagnosis, layer: int) -> ScoreDecision:
        decisions = [rule.decide(diagnosis, layer) for rule in self.rules]
        keep = torch.stack([decision.keep for decision in decisions])
        strength = torch.stack([decision.strength for decision in decisions])
        is_and = isinstance(self, And)
        # Removed directions have strength 0 (`keep_only`): of a union, the strength is that of a rule that keeps it.
        index = strength.abs().argmin(0) if is_and else strength.abs().argmax(0)
        spectrum = diagnosis.layers[layer].spectrum
        combined = give_strengths(spectrum, keep.all(0) if is_and else keep.any(0), strength.gather(0, index[None])[0])
        by_head = zip(*(decision.reasons for decision in decisions), strict=True)
        reasons = tuple(
            f"{reason}. {self.how}: "
            + "; ".join(f"[{rule}] {part}" for rule, part in zip(self.rules, why, strict=True))
            for reason, why in zip(combined.reasons, by_head, strict=True)
        )
        return replace(combined, reasons=reasons)


@dataclass(frozen=True)
class And(Combination):
    """Keeps the directions that all of its rules keep, with the smallest strength of them."""

    how: ClassVar[str] = "All of"
    sign: ClassVar[str] = " & "


@dataclass(frozen=True)
class Or(Combination):
    """Keeps the directions that any of its rules keeps, with the largest strength of them."""

    how: ClassVar[str] = "Any of"
    sign: ClassVar[str] = " | "


@dataclass(frozen=True)
class ByLayer(Rule):
    """Applies a separate rule to every layer, the first rule to the first layer.

    A target per layer resolves to this rule: the rank that meets the target differs from layer to layer. As text:
    by_layer(total_rank:0.5; total_rank:0.25).

    Raises:
        InvalidRule: By `decide`, if the diagnosis has another number of layers.
    """

    rules: tuple[Rule, ...]

    def decide(self, diagnosis: Diagnosis, layer: int) -> ScoreDecision:
        if len(self.rules) != len(diagnosis.layers):
            raise InvalidRule(
                f"by_layer has {len(self.rules)} rules for {len(diagnosis.layers)} layers: give one each."
            )
        return self.rules[layer].decide(diagnosis, layer)


def rule_name(kind: type[Rule]) -> str:
    """Returns the name of a rule in text: `EnergyRetention` is `energy_retention`."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower()


def inner_rules(rule: Rule) -> tuple[Rule, ...]:
    """Returns the rules that are fields of a rule."""
    values = [getattr(rule, name) for name in knobs_of(type(rule), Rule)]  # a rule, a tuple of rules, or a knob
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
    own_metric = rule.default_metric if rule.metric is None and defaults else rule.metric
    parts = (metric_of(part, defaults=defaults) for part in inner_rules(rule))
    requested = {metric for metric in (own_metric, *parts) if metric is not None}
    if len(requested) > 1:
        raise InvalidRule(f"{rule} decides in the metrics {' and '.join(sorted(requested))}; give all parts the same.")
    return next(iter(requested), None)


def in_metric(rule: Rule, metric: str) -> Rule:
    """Returns the rule with its metric stated, in each of its parts where it has parts."""
    if not inner_rules(rule):
        return replace(rule, metric=metric)
    changed: dict[str, Any] = {}
    for name in knobs_of(type(rule), Rule):
        value = getattr(rule, name)
        if isinstance(value, Rule):
            changed[name] = in_metric(value, metric)
        elif isinstance(value, tuple):
            changed[name] = tuple(in_metric(part, metric) for part in value)
    # Stated by the parts alone, so that the text of the rule names a metric once for each of them.
    return replace(rule, metric=None, **changed)


def learned_spectrum(rule: Rule, diagnosis: Diagnosis, layer: int) -> Spectrum:
    """Returns one layer's spectrum; raises NotSupported for dense attention, whose strengths are 1 and rank nothing.

    Other equal strengths are accepted: learned ones, and those of a dead layer, which are all zero or (in a metric) all
    at the noise floor.
    """
    spectrum = diagnosis.layers[layer].spectrum
    strength = spectrum.strength[spectrum.used]
    if not spectrum.has_norms and strength.numel() > 1 and bool((strength == 1).all()):
        raise NotSupported(
            f"{rule} ranks by strength, but layer {layer} is dense attention, where every direction has strength 1. "
            "State a metric of the data, e.g. metric=mix, or train an SVDA model."
        )
    return spectrum


def _spell_knobs(rule: Rule) -> str:
    """Returns the knobs: those without a default by position, the others by name where they differ from it."""
    knobs = []
    for field in knobs_of(type(rule), Rule).values():
        value = getattr(rule, field.name)
        # repr keeps all digits of a float, so that the text gives an equal rule; names are written without quotes.
        if field.default is not dataclasses.MISSING and value != field.default:
            knobs.append(f"{field.name}={value}" if isinstance(value, str) else f"{field.name}={value!r}")
        elif field.default is dataclasses.MISSING and not isinstance(value, Rule | tuple):
            knobs.append(repr(value))
    return ":" + ",".join(knobs) if knobs else ""
