"""Creates a prescription from a diagnosis and rules."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch

from attnrx.decide.rules.metrics import OWN, directions_in, rewritten
from attnrx.decide.rules.outputs import (
    CENTERED,
    decide_heads,
    decide_hidden,
    decide_linear,
    decide_values,
    limited_to_heads,
    metric_reasons,
    output_metric,
    without_heads,
)
from attnrx.decide.rules.parsing import RulesLike, parse_rules
from attnrx.decide.rules.rotary import RotaryDirections, whole_pairs
from attnrx.decide.rules.rule import Rule, in_metric, inner_rules, keep_only, metric_of
from attnrx.nouns.diagnosis import Diagnosis
from attnrx.nouns.prescription import (
    Decision,
    HeadDecision,
    LayerPrescription,
    OutputDecision,
    Prescription,
    ScoreDecision,
    TokenPrescription,
)
from attnrx.support.errors import InvalidInput, InvalidRule, NoOpPrescription, NotSupported
from attnrx.support.progress import track
from attnrx.vit.maps import HEADS, HIDDEN, LINEAR_MAPS, UNIT_MAPS
from attnrx.vit.spectrum import Spectrum


def prescribe_maps(diagnosis: Diagnosis, rules: RulesLike, refit: bool = True) -> Prescription:
    """Returns a prescription for every map that `rules` names, in every layer.

    The rule of "heads" decides first; the other rules see a layer without the removed heads. In the metric "centered"
    the output projection is refitted to the remaining heads, which is a decision about "vo". The rule of "qk" decides
    about the optimal directions in its metric (METRICS), by their strengths there, or about the model's own; without it
    the scores do not change. The rules of "vo", "fc1" and "fc2" decide in their metric (OUTPUT_METRICS), that
    of "hidden" in one of HIDDEN_METRICS. "tokens" needs
    no reading, because tokens are selected for every image at run time. The prescription records the rules with their
    metrics, and all information of the diagnosis about its model and data.

    A rule may remove all directions of a map, e.g. to compare with a model without it; `attnrx.prescribe` refuses that
    (`require_remainder`). Without `refit` the decisions about hidden units are not ones to realize (`decide_hidden`).

    Raises:
        NoOpPrescription: The prescription changes nothing.
        InvalidInput: The diagnosis has no layers, or lacks a reading that a rule needs.
        InvalidRule: A rule does not apply to its map.
        NotSupported: A norm over all features fixes a map, or `hidden` is combined with ranks of the MLP.
    """
    rules_by_map, tokens = parse_rules(rules)
    if not diagnosis.layers:
        raise InvalidInput("prescribe found a diagnosis without layers; diagnose a model that has attention.")
    if tokens is not None:
        tokens.policy.require_depth(len(diagnosis.layers))
    _require_changeable(diagnosis, rules_by_map)
    stated = {name: _with_metric(diagnosis, name, rule) for name, rule in rules_by_map.items()}
    heads: list[HeadDecision | None] = [None] * len(diagnosis.layers)
    if HEADS in stated:
        heads = decide_heads(diagnosis, stated[HEADS])
    without_removed = [
        replace(layer, spectrum=without_heads(layer.spectrum, removal))
        for layer, removal in zip(diagnosis.layers, heads, strict=True)
    ]
    scores, spectra = _decide_scores(replace(diagnosis, layers=tuple(without_removed)), stated.get("qk"))
    scores = [limited_to_heads(layer, removal) for layer, removal in zip(scores, heads, strict=True)]
    # By map a list over the layers; transposed below.
    decisions_by_map: dict[str, Sequence[Decision | None]] = {"qk": scores}
    # Removed heads change vo without a rule of its own, too: the output projection is refitted to the other heads.
    if "vo" in stated or (HEADS in stated and any(heads) and output_metric(stated[HEADS], HEADS) == CENTERED):
        decisions_by_map["vo"] = decide_values(diagnosis, stated.get("vo"), heads)
    decisions_by_map |= {name: decide_linear(diagnosis, name, stated[name]) for name in LINEAR_MAPS if name in stated}
    decisions_by_map[HEADS] = heads
    if HIDDEN in stated:
        decisions_by_map[HIDDEN] = decide_hidden(diagnosis, stated[HIDDEN], refit)
    layers = tuple(
        LayerPrescription(
            {name: part for name, part in zip(decisions_by_map, decisions, strict=True) if part is not None}
        )
        for decisions in zip(*decisions_by_map.values(), strict=True)
    )
    # Decisions about units exist only in layers where some are removed.
    units = any(name in layer.decisions for layer in layers for name in UNIT_MAPS)
    drops = tokens is not None and tokens.policy.drops
    if not (drops or units or any(layer.outputs for layer in layers) or any(map(_changes_scores, spectra, scores))):
        raise NoOpPrescription(_no_op_message(spectra, scores, rules_by_map, tokens))
    texts = {name: str(rule) for name, rule in stated.items()}
    return Prescription(layers, texts, diagnosis.fingerprint, diagnosis.about, tokens)


def require_remainder(prescription: Prescription) -> Prescription:
    """Returns the prescription; raises InvalidRule if it removes a map as a whole, in all layers and heads."""
    for name in prescription.rules:
        kept = [_num_kept(layer, name) for layer in prescription.layers]
        if None not in kept and not any(kept):
            raise InvalidRule(
                f"{name}={prescription.rules[name]} removes all of {name} in every layer. Keep more, or make such a "
                "model on purpose with attnrx.rules.prescribe_maps."
            )
    return prescription


def _num_kept(layer: LayerPrescription, name: str) -> int | None:
    """Returns how many directions or units of a map a layer keeps; None if they all stay, without a decision."""
    decision = layer.decisions.get(name)
    if decision is None:
        return None
    return sum(decision.ranks) if isinstance(decision, OutputDecision) else int(decision.keep.sum())


def _require_changeable(diagnosis: Diagnosis, names: Collection[str]) -> None:
    """Raises NotSupported for maps of which nothing can be removed in some layer, or that exclude one another."""
    linear = [name for name in LINEAR_MAPS if name in names]
    if HIDDEN in names and linear:
        raise NotSupported(
            f"hidden and {' and '.join(linear)} in one prescription: the ranks of these maps depend on the units that "
            "stay. Realize hidden first, then diagnose and prescribe the result."
        )
    of_attention = [name for name in ("qk", "vo", HEADS) if name in names]
    if of_attention and not any(layer.spectrum.heads for layer in diagnosis.layers):
        raise NotSupported(
            f"{' and '.join(of_attention)} of a model without heads: its attention has no reader, or all of it was "
            "removed. Prescribe hidden=..., e.g. hidden=total_rank:0.5."
        )
    for index, layer in enumerate(diagnosis.layers):
        fixed = [name for name in names if name in layer.spectrum.fixed]
        if fixed:
            features = "query and key" if "qk" in fixed else "the outputs of all heads"
            raise NotSupported(
                f"nothing of {' and '.join(fixed)} can be removed: layer {index} has a norm over all features of "
                f"{features}. Prescribe other maps, e.g. fc1=total_rank:0.5, or tokens."
            )


def _applies(rule: Rule, name: str) -> bool:
    return name in rule.applies_to and all(_applies(part, name) for part in inner_rules(rule))


def _with_metric(diagnosis: Diagnosis, name: str, rule: Rule) -> Rule:
    """Returns the rule with its metric stated, unless that is the model's own by default."""
    if not _applies(rule, name):
        other = "remove_heads or total_rank:0.75" if name == HEADS else "total_rank:0.5 or energy_retention:0.9"
        raise InvalidRule(f"{name}={rule}: this rule does not apply to {name}; use e.g. {other}.")
    if name != "qk":
        return in_metric(rule, output_metric(rule, name))
    has_own_order = any(layer.spectrum.has_own_order for layer in diagnosis.layers)
    metric = metric_of(rule, defaults=not has_own_order)
    return rule if metric is None else in_metric(rule, metric)


def _decide_scores(diagnosis: Diagnosis, rule: Rule | None) -> tuple[list[ScoreDecision], list[Spectrum]]:
    """Returns the decision about every layer's scores and the spectrum that it refers to."""
    own_spectra = [layer.spectrum for layer in diagnosis.layers]
    unchanged = [keep_only(spectrum, spectrum.used) for spectrum in own_spectra]
    if rule is None:
        return unchanged, own_spectra
    metric = metric_of(rule) or OWN
    if metric == OWN:
        decisions = [rule.decide(diagnosis, layer) for layer in track(range(len(own_spectra)), "prescribing layers")]
        pairs = zip(decisions, own_spectra, strict=True)
        return [whole_pairs(decision, spectrum) for decision, spectrum in pairs], own_spectra
    view, bases = rewritten(diagnosis, metric)
    layers, spectra = [], []
    for index, basis in enumerate(track(bases, "prescribing layers")):
        spectrum, layer = view.layers[index].spectrum, rule.decide(view, index)
        if layer.basis is not None:
            raise InvalidRule(f"{rule} rewrites the directions itself; omit metric={metric!r}.")
        reasons = metric_reasons(layer, metric)
        if not _changes_scores(spectrum, layer):
            # The layer keeps its own directions: rewritten ones would differ by rounding.
            spectrum, layer = own_spectra[index], replace(unchanged[index], reasons=reasons)
        elif spectrum.pairs is None:
            layer = replace(layer, basis=basis, reasons=reasons)
        else:  # the rule decides the ranks only; the best form of a rank does not contain those of smaller ranks
            rotary = directions_in(metric, diagnosis.layers[index])
            assert isinstance(rotary, RotaryDirections)
            layer = rotary.decision(layer.ranks, reasons)
        layers.append(layer)
        spectra.append(spectrum)
    return layers, spectra


def _changes_scores(spectrum: Spectrum, layer: ScoreDecision) -> bool:
    if layer.keep.shape != spectrum.used.shape:  # shared or rewritten directions
        return True
    return bool((spectrum.used & ~layer.keep).any()) or bool(
        (layer.strength.double() != spectrum.strength.double())[spectrum.used].any()
    )


def _no_op_message(
    spectra: list[Spectrum], scores: list[ScoreDecision], rules: Mapping[str, Rule], tokens: TokenPrescription | None
) -> str:
    if not rules:
        cause = "neither a rule nor a policy was given" if tokens is None else f"{tokens.policy} keeps every token"
        return (
            f"{cause}, so the model would not change: give a rule, e.g. qk=total_rank:0.5, or tokens=evit:0.7@4,7,10."
        )
    texts = " ".join(f"{name}={rule}" for name, rule in rules.items())
    cause = f"{texts} would change nothing: every map keeps everything, or (fc1, fc2) has no rank that saves parameters"
    strengths = torch.cat([spectrum.strength[spectrum.used].abs().flatten() for spectrum in spectra])
    reasons = [reason for layer in scores for reason in layer.reasons]
    if "qk" in rules and len(strengths):
        span = f"|strength| of qk lies in {strengths.min():.3g}..{strengths.max():.3g}"
        cause = f"{cause} ({span}; the first head {reasons[0]})"
    return f"{cause}. Request a smaller rank or share, or use another rule."
