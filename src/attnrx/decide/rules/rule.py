"""Rules that decide which directions to keep: their interface, common rules, combinations, and parsing from text.

Helper functions get what a rule needs from a diagnosis, and turn masks into decisions.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, Context, Decimal
from typing import Any, ClassVar, NamedTuple

import torch

from attnrx.change.decompositions import water_fill
from attnrx.decide.diagnostics import energy
from attnrx.nouns.diagnosis import Diagnosis
from attnrx.nouns.prescription import DepthPrescription, ScoreDecision, TokenPrescription, parse_depth
from attnrx.support.arguments import (
    COUNT,
    NATURAL,
    SHARE,
    Kind,
    checked,
    described,
    each,
    either,
    instance,
    one_of,
    require_fields,
)
from attnrx.support.errors import InvalidInput, InvalidRule, NotSupported, UnknownName
from attnrx.support.registry import Registry, text_name
from attnrx.support.shapes import Bool, Float, Int, Tensor
from attnrx.support.text_parsing import TextReader, knobs_of, spelled_knobs, split_named
from attnrx.vit.maps import DEPTH, HEADS, HIDDEN, LAYER_MAPS, MAPS, TOKENS
from attnrx.vit.spec import Spectrum
from attnrx.vit.tokens import TokenPolicy, parse_policy

RULE = "a rule, e.g. EnergyRetention(0.9)"
# Sums of shares have rounding errors of about 1e-15. Without this tolerance, a share of 0.07 of 100 equal directions
# would keep 8.
TOLERANCE = 1e-12


@dataclass(frozen=True, kw_only=True)
class Rule(ABC):
    """Decides which directions of a map to keep, layer by layer.

    Every rule is a frozen dataclass with its options as fields. `metric` ranks the directions (METRICS for scores,
    OUTPUT_METRICS for other maps). None means the rule's default metric. `a & b` keeps the directions that both rules
    keep. `a | b` keeps the directions that at least one of them keeps. `parse_rule(str(rule))` returns an equal rule.
    """

    metric: str | None = None

    default_metric: ClassVar[str | None] = None
    """The metric for scores without norms, if you give none."""
    applies_to: ClassVar[tuple[str, ...]] = LAYER_MAPS
    """The maps that the rule can prune: only qk if the rule uses attention, changes strengths or shares directions."""
    head_metric: ClassVar[str] = "centered"
    """The metric for heads (HEAD_METRICS), if you give none."""
    kinds: ClassVar[Mapping[str, Kind]] = {}
    """Checks for options that need more than the usual check for their type (numbers, shares, rules)."""

    def __post_init__(self):
        rule = instance(RULE, Rule)
        by_type = {
            int: NATURAL,
            float: SHARE,
            int | float: either(
                "a whole number of directions, or a share above 0, at most 1, e.g. 0.5", NATURAL, SHARE
            ),
            Rule: rule,
            tuple[Rule, ...]: each(rule, "a tuple of rules", least=1),
        }
        try:
            require_fields(self, by_type, **self.kinds)
        except InvalidInput as error:
            raise InvalidRule(str(error)) from None

    @abstractmethod
    def decide(self, diagnosis: Diagnosis, layer: int) -> ScoreDecision:
        """Returns the decision about one layer: its kept directions, their strengths, and the reasons.

        Rules read the layer's spectrum, and get everything else by `LayerDiagnosis.reading`.
        """

    def __and__(self, other: "Rule") -> "And":
        return And((self, other))

    def __or__(self, other: "Rule") -> "Or":
        return Or((self, other))

    def __str__(self) -> str:
        parts = "; ".join(str(part) for part in inner_rules(self))
        knobs = spelled_knobs(self)  # without options that are rules
        return text_name(type(self)) + (f"({parts})" if parts else "") + (f":{knobs}" if knobs else "")


def learned_spectrum(rule: Rule, diagnosis: Diagnosis, layer: int) -> Spectrum:
    """Returns one layer's spectrum. Raises NotSupported if all strengths are 1, as in dense attention.

    If all strengths are 1, they cannot rank directions. If all strengths are equal but not 1, they are accepted,
    because either a model has learned them, or the layer is dead. In a dead layer, all strengths are zero or, if they
    come from a metric, at the noise floor.
    """
    spectrum = diagnosis.layers[layer].spectrum
    strength = spectrum.strength[spectrum.used]
    if not spectrum.has_norms and strength.numel() > 1 and bool((strength == 1).all()):
        raise NotSupported(
            f"{rule} ranks by strength, but layer {layer + 1} is dense attention, where every direction has strength "
            "1. State a metric of the data, e.g. metric=mix, or train a model that learns strengths."
        )
    return spectrum


def rank_positions(
    amount: Float[Tensor, "heads directions"], used: Bool[Tensor, "heads directions"]
) -> Int[Tensor, "heads directions"]:
    """Returns each direction's position in its head, sorted by amount: 0 for the largest amount.

    Ties keep their order. Padding comes last.
    """
    # Amounts are never negative, so -1 sorts the padding last. The argsort of a permutation is its inverse.
    order = amount.masked_fill(~used, -1.0).argsort(dim=-1, descending=True, stable=True)
    return order.argsort(dim=-1)


def largest(
    amount: Float[Tensor, "heads directions"], used: Bool[Tensor, "heads directions"], ranks: Int[Tensor, "heads"]
) -> Bool[Tensor, "heads directions"]:
    """Returns a mask of the `ranks` directions with the largest amounts in each head, or of all if there are fewer."""
    return (rank_positions(amount, used) < ranks[:, None]) & used


def fewest_holding(
    share: float, amount: Float[Tensor, "heads directions"], used: Bool[Tensor, "heads directions"]
) -> Bool[Tensor, "heads directions"]:
    """Returns a mask of the fewest directions in each head that hold this share of the head's total amount.

    If the amount is the energy, this is Eq. 45 of SVDA. Ties are broken by the lower index. At least one direction is
    kept. A share of 1 keeps all directions with a nonzero amount.
    """
    if share == 1:
        # Directions are counted, because a rounded sum can reach its total before the last amount is added.
        ranks = ((amount > 0) & used).sum(-1)
    else:
        cumulative = amount.masked_fill(~used, 0.0).sort(dim=-1, descending=True).values.cumsum(-1)
        ranks = (cumulative < (share - TOLERANCE) * cumulative[:, -1:]).sum(-1) + 1
    return largest(amount, used, ranks.clamp(min=1))


@checked()
def score_bound(spectrum: Spectrum, decision: ScoreDecision) -> Float[Tensor, "heads"]:
    """Returns, per head, a bound on how much any score of the same tokens changes (SVDA, Theorem 1, Eq. 12).

    The bound is max |change of strength| * scale, because query and key rows have unit length. The bound also holds if
    directions get other strengths instead of being removed. For dense attention, any change makes the bound infinite,
    because rows may have any length. The bound is also infinite if all heads share their directions.
    """
    if decision.keep.shape != spectrum.used.shape:  # no bound exists for shared directions
        return torch.full((len(decision.keep),), math.inf, dtype=torch.float64)
    prescribed = torch.where(decision.keep, decision.strength.double(), 0.0)
    change = torch.where(spectrum.used, spectrum.strength.double() - prescribed, 0.0).abs()
    # amax is undefined for an empty row. The padding column of zeros gives heads without directions the bound 0.
    bound = torch.nn.functional.pad(change, (0, 1)).amax(-1) * spectrum.scale
    return bound if spectrum.has_norms else torch.where(bound == 0, bound, math.inf)


def keep_only(spectrum: Spectrum, keep: Bool[Tensor, "heads directions"], notes: Sequence[str] = ()) -> ScoreDecision:
    """Returns a decision that keeps these directions with their present strengths.

    `notes` holds one remark per head. Removed directions get strength zero, so the strengths alone are enough to
    compare and combine decisions.
    """
    keep = keep & spectrum.used
    return give_strengths(spectrum, keep, torch.where(keep, spectrum.strength.double(), 0.0), notes)


def give_strengths(
    spectrum: Spectrum,
    keep: Bool[Tensor, "heads directions"],
    strength: Float[Tensor, "heads directions"],
    notes: Sequence[str] = (),
) -> ScoreDecision:
    """Returns a decision that keeps these directions with these strengths."""
    decision = ScoreDecision(keep, strength, ("",) * keep.shape[0])
    # Theorem 1 of SVDA only bounds scores, so other maps have no bound.
    bounds = score_bound(spectrum, decision).tolist() if spectrum.map == "qk" else [0.0] * len(keep)
    reasons = (_reason(spectrum, keep, head, notes[head] if notes else "", bound) for head, bound in enumerate(bounds))
    return replace(decision, reasons=tuple(reasons))


def at_most(value: float) -> str:
    """Formats an upper bound with three digits, rounded up so that it stays a bound."""
    return f"{float(Context(prec=3, rounding=ROUND_CEILING).create_decimal(Decimal(value))):g}"


def _reason(spectrum: Spectrum, keep: Tensor, head: int, note: str, bound: float) -> str:
    """Describes what a head keeps and loses, and how far its scores can change."""
    used, is_removed = spectrum.used[head], spectrum.used[head] & ~keep[head]
    rank, total = int(keep[head].sum()), int(used.sum())
    what = {HEADS: "heads", HIDDEN: "hidden units"}.get(spectrum.map, "directions")
    if not total:
        text = f"has no {what}"
    elif not rank:
        consequence = "attends uniformly" if spectrum.map == "qk" else "gives its mean"
        text = f"keeps none of {total} {what} and {consequence}"
    else:
        text = f"keeps all {total} {what}" if rank == total else f"keeps {rank} of {total} {what}"
    text += f" ({note})" if note else ""
    if total and not bool(spectrum.strength[head][used].any()):
        text += "; all strengths are zero"
    elif bool(is_removed.any()):
        share = (energy(spectrum.strength.double(), spectrum.used)[head] * keep[head]).sum().item()
        strongest = spectrum.strength[head][is_removed].abs().max().item()
        text += f": {100 * share:.1f} % of the energy" if rank else ""
        text += f"; largest removed strength {strongest:.3g}"
    if math.isinf(bound):
        return f"{text}; no bound on the scores, as dense rows have any length"
    return f"{text}; no masked score moves by more than {at_most(bound)} (Theorem 1)" if bound else text


@dataclass(frozen=True)
class EnergyRetention(Rule):
    """Keeps the fewest directions of each head whose energy reaches the retention ratio rho (SVDA, Eqs. 44 and 45).

    At least one direction is kept. With rho = 1, all directions with a nonzero strength are kept. Ties are broken by
    the lower index. The removed share of the head's energy is at most 1 - rho, so no score changes by more than
    sqrt(1 - rho) * norm(strength) * scale. The rule needs learned strengths.
    """

    rho: float

    def decide(self, diagnosis: Diagnosis, layer: int) -> ScoreDecision:
        spectrum = learned_spectrum(self, diagnosis, layer)
        shares = energy(spectrum.strength.double(), spectrum.used)
        return keep_only(spectrum, fewest_holding(self.rho, shares, spectrum.used))


@dataclass(frozen=True)
class UniformRank(Rule):
    """Keeps the strongest directions of each head (IrrAtt's TruncAtt, Section 2.3). A float `rank` is a share of them.

    With the metric "weights", the rule is the truncated singular value decomposition of each head's W_Q W_K^T.
    "weights" is the default for scores without norms. Otherwise, the default is the same as for TotalRank. The rank is
    rounded to a multiple of `multiple`, because kernels load several values at once. Kernels are slower at a rank
    between two multiples than at the larger multiple.
    """

    default_metric: ClassVar[str | None] = "weights"
    kinds: ClassVar[Mapping[str, Kind]] = {"multiple": COUNT}

    rank: int | float
    multiple: int = 1

    def decide(self, diagnosis: Diagnosis, layer: int) -> ScoreDecision:
        spectrum = learned_spectrum(self, diagnosis, layer)
        available = spectrum.used.sum(-1)
        target = available.clamp(max=int(self.rank)) if isinstance(self.rank, int) else self.rank * available
        # A head may always keep all its directions, even if their number is not a multiple.
        ranks = ((target / self.multiple).round().long() * self.multiple).minimum(available)
        return keep_only(spectrum, largest(spectrum.strength.abs(), spectrum.used, ranks))


@dataclass(frozen=True)
class TotalRank(Rule):
    """Keeps the `rank` strongest directions of a layer, from all of its heads. A float `rank` is a share of them.

    The method is water-filling. Of all selections of the same size, this selection removes the least energy, so heads
    get different ranks. With `scope="model"`, the total is distributed over all layers. The rank of every head is a
    multiple of `multiple` and at least `minimum`, even if you request a smaller share.

    `metric` defines the strengths (see METRICS). With "own", these are the model's own strengths. The default metric is
    "mix" for scores without norms, and "own" for scores with norms. For values and MLPs, the default is "centered" (see
    OUTPUT_METRICS).
    """

    default_metric: ClassVar[str | None] = "mix"
    kinds: ClassVar[Mapping[str, Kind]] = {"scope": one_of("layer", "model"), "multiple": COUNT}

    rank: int | float
    scope: str = "layer"
    multiple: int = 1
    minimum: int = 1

    def decide(self, diagnosis: Diagnosis, layer: int) -> ScoreDecision:
        spectrum = learned_spectrum(self, diagnosis, layer)
        indices = range(len(diagnosis.layers)) if self.scope == "model" else (layer,)
        spectra = [learned_spectrum(self, diagnosis, index) for index in indices]
        has_rows = [view.used.any(-1) for view in spectra]  # removed heads get no part of the total
        ranks = self.allocated(diagnosis, indices, spectra, has_rows)
        # A rule has no state. So with scope="model", every layer repeats the whole allocation and uses its own part.
        position = layer if self.scope == "model" else 0
        num_kept = torch.zeros(len(has_rows[position]), dtype=torch.long)
        num_kept[has_rows[position]] = torch.tensor(ranks[position], dtype=torch.long)
        heads_text = f" for the layer's {len(ranks[position])} heads" if len(num_kept) > 1 else ""
        notes = [f"{sum(ranks[position])}{heads_text}, the strongest of the {self.scope}"] * len(num_kept)
        return keep_only(spectrum, largest(spectrum.strength.abs(), spectrum.used, num_kept), notes)

    def allocated(
        self, diagnosis: Diagnosis, layers: Sequence[int], spectra: list[Spectrum], has_rows: list[Tensor]
    ) -> Sequence[Sequence[int]]:
        """Returns the ranks of the heads in these layers, without heads that have no rows (`has_rows` [heads])."""
        strengths = [(view.strength * view.used)[heads] for view, heads in zip(spectra, has_rows, strict=True)]
        return water_fill(strengths, total=self.total(spectra), multiple=self.multiple, minimum=self.minimum)

    def total(self, spectra: list[Spectrum]) -> int:
        """Returns how many directions the heads with these spectra keep in total."""
        available = sum(int(spectrum.used.sum()) for spectrum in spectra)
        target = self.rank * (len(spectra) if isinstance(self.rank, int) else available)
        total = round(target / self.multiple) * self.multiple
        if isinstance(self.rank, int):
            return total
        # A share below the minimum for all heads is raised to it. A number below it makes the allocation raise.
        units = sum(int(spectrum.used.any(-1).sum()) for spectrum in spectra)
        return max(total, units * -(-self.minimum // self.multiple) * self.multiple)


@dataclass(frozen=True)
class Combination(Rule):
    """The base class of rules that combine the decisions of several rules about the same directions."""

    rules: tuple[Rule, ...]

    how: ClassVar[str]
    sign: ClassVar[str]

    def __post_init__(self):
        super().__post_init__()
        # Nested combinations are flattened, so that (a & b) & c equals a & (b & c).
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
        # Removed directions have strength 0 (`keep_only`). So a union gets its strength from a rule that keeps the
        # direction.
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
    """Keeps the directions that all inner rules keep. Each gets the smallest strength that a rule assigns to it."""

    how: ClassVar[str] = "All of"
    sign: ClassVar[str] = " & "


@dataclass(frozen=True)
class Or(Combination):
    """Keeps the directions that any inner rule keeps. Each gets the largest strength that a rule assigns to it."""

    how: ClassVar[str] = "Any of"
    sign: ClassVar[str] = " | "


@dataclass(frozen=True)
class ByLayer(Rule):
    """Applies a separate rule to every layer. The first rule applies to the first layer.

    A target per layer needs such a rule, because the rank that meets the target differs from layer to layer. An example
    of the rule's text form is by_layer(total_rank:0.5; total_rank:0.25).

    Raises:
        InvalidRule: Raised by `decide` if the diagnosis has another number of layers.
    """

    rules: tuple[Rule, ...]

    def decide(self, diagnosis: Diagnosis, layer: int) -> ScoreDecision:
        if len(self.rules) != len(diagnosis.layers):
            raise InvalidRule(
                f"by_layer has {len(self.rules)} rules for {len(diagnosis.layers)} layers: give one each."
            )
        return self.rules[layer].decide(diagnosis, layer)


def inner_rules(rule: Rule) -> tuple[Rule, ...]:
    """Returns the rules that a rule contains as fields."""
    values = [getattr(rule, name) for name in knobs_of(type(rule), Rule)]  # a rule, a tuple of rules, or a knob
    flat = [item for value in values for item in (value if isinstance(value, tuple) else (value,))]
    return tuple(item for item in flat if isinstance(item, Rule))


def metric_of(rule: Rule, *, defaults: bool = False) -> str | None:
    """Returns the metric of a rule and its parts, or None. With `defaults`, parts without a metric use their default.

    Raises:
        InvalidRule: The parts have different metrics, so their directions cannot be combined.
    """
    own_metric = rule.default_metric if rule.metric is None and defaults else rule.metric
    parts = (metric_of(part, defaults=defaults) for part in inner_rules(rule))
    requested = {metric for metric in (own_metric, *parts) if metric is not None}
    if len(requested) > 1:
        raise InvalidRule(f"{rule} decides in the metrics {' and '.join(sorted(requested))}; give all parts the same.")
    return next(iter(requested), None)


def in_metric(rule: Rule, metric: str) -> Rule:
    """Returns the rule with this metric. If the rule has parts, each part gets the metric instead."""
    if not inner_rules(rule):
        return replace(rule, metric=metric)
    changed: dict[str, Any] = {}
    for name in knobs_of(type(rule), Rule):
        value = getattr(rule, name)
        if isinstance(value, Rule):
            changed[name] = in_metric(value, metric)
        elif isinstance(value, tuple):
            changed[name] = tuple(in_metric(part, metric) for part in value)
    # Only the parts get the metric, so that the rule's text names it once per part.
    return replace(rule, metric=None, **changed)


# The rules by their names in texts. `attnrx_lab` registers more: rules from papers and matched controls.
RULES = Registry[type[Rule]]("rule", EnergyRetention, TotalRank, UniformRank, ByLayer)

RulesLike = str | Rule | Mapping[str, str | Rule | TokenPolicy | TokenPrescription | DepthPrescription | None]
"""Rules for several maps: one text, or a mapping from maps to rules or texts. A single `Rule` applies to qk."""

EXAMPLES = "energy_retention:0.9, threshold:0.1 & remove_heads, random_matched(top_rank:32):seed=3"


def parse_rule(text: str) -> Rule:
    """Builds a rule from text such as `energy_retention:0.90` or `threshold:0.1 & remove_heads`."""
    reader = _Reader(text)
    rule = reader.read_any()
    reader.expect("end", "'&', '|' or the end")
    return rule


def split_maps(text: str) -> dict[str, str]:
    """Splits a text like "qk=total_rank:0.5 vo=total_rank:0.75 tokens=ward:0.7@4,7,10" into the rule text of every map.

    A text without map names is the rule for qk.

    Raises:
        InvalidRule: A map is given twice or without a rule.
        UnknownName: A map does not exist.
    """
    before, parts = split_named(text)
    if not parts:
        return {"qk": before} if before else {}
    for name, _ in parts:
        _require_map(name)
    rules = dict(parts)
    if before or len(rules) < len(parts) or not all(rules.values()):
        raise InvalidRule(f"the rules {text!r}: give every map once with its rule, as in qk=total_rank:0.5.")
    return rules


def _require_map(name: str) -> None:
    if name not in MAPS:
        raise UnknownName("map", name, MAPS)


class ParsedRules(NamedTuple):
    """Parsed rules: the rule for every map of the layers, the token policy, and the blocks to remove."""

    maps: dict[str, Rule]
    tokens: TokenPrescription | None
    depth: DepthPrescription | None


def parse_rules(rules: RulesLike) -> ParsedRules:
    """Parses rules into the rule for every map, the token policy, and the blocks to remove.

    A text looks like "qk=total_rank:0.5 vo=total_rank:0.75 tokens=ward:0.7@4,7,10". A single rule applies to qk.

    Raises:
        InvalidInput: `rules` is neither a text, nor a rule, nor a mapping from maps to rules and a token policy.
        UnknownName: There is no map with this name.
    """
    values_by_map = {"qk": rules} if isinstance(rules, Rule) else split_maps(rules) if isinstance(rules, str) else rules
    if not isinstance(values_by_map, Mapping):
        raise InvalidInput(f"rules={described(rules)}: give a text, e.g. 'qk=total_rank:0.5', a rule, or both by map.")
    for name in values_by_map:
        _require_map(str(name))
    rules_by_map: dict[str, Rule] = {}
    for name in LAYER_MAPS:  # always in the same order, whatever the order in the text
        rule = values_by_map.get(name)
        rule = parse_rule(rule) if isinstance(rule, str) else rule
        if isinstance(rule, Rule):
            rules_by_map[name] = rule
        elif rule is not None:
            raise InvalidInput(f"{name}={described(rule)} is not a rule; give e.g. EnergyRetention(0.9), or its text.")
    policy = values_by_map.get(TOKENS)
    policy = parse_policy(policy) if isinstance(policy, str) else policy
    if policy is not None and not isinstance(policy, TokenPolicy | TokenPrescription):
        raise InvalidInput(f"tokens={policy!r} is not a policy; give e.g. 'ward:0.7@4,7,10'.")
    depth = values_by_map.get(DEPTH)
    depth = parse_depth(depth) if isinstance(depth, str) else depth
    if depth is not None and not isinstance(depth, DepthPrescription):
        raise InvalidInput(f"depth={depth!r} names no blocks to remove; give e.g. 'without:5,9'.")
    return ParsedRules(rules_by_map, TokenPrescription(policy) if isinstance(policy, TokenPolicy) else policy, depth)


class _Reader(TextReader):
    """Parses the text of rules. Every method reads the tokens of one grammar rule."""

    #   any    = all { "|" all }
    #   all    = single { "&" single }
    #   single = "(" any ")" | call, where the knobs of controls and `by_layer` are rules
    noun, plural, examples, signs, error = "rule", "Rules", EXAMPLES, "&|():,;=", InvalidRule
    nested = Rule

    def read_any(self) -> Rule:
        rules = [self._read_all()]
        while self.take("|"):
            rules.append(self._read_all())
        return Or(tuple(rules)) if len(rules) > 1 else rules[0]

    read_nested = read_any

    def _read_all(self) -> Rule:
        rules = [self._read_single()]
        while self.take("&"):
            rules.append(self._read_single())
        return And(tuple(rules)) if len(rules) > 1 else rules[0]

    def _read_single(self) -> Rule:
        if self.take("("):
            rule = self.read_any()
            self.expect(")", "')'")
            return rule
        name, kind = self.read_name(RULES)
        return self.build(name, kind, self.read_knobs(name, kind, is_short=True))


def by_layer(rules: Sequence[Rule]) -> Rule:
    """Combines one rule per layer. Returns the common rule if all are equal, else a ByLayer."""
    return rules[0] if all(rule == rules[0] for rule in rules) else ByLayer(tuple(rules))
