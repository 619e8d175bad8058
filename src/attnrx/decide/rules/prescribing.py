"""Applies rules to a diagnosis and creates a prescription, for qk, vo, fc1, fc2, heads and hidden units."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from attnrx.change.decompositions import (
    Balanced,
    balance,
    compensated,
    elimination_losses,
    factor_directions,
    pays,
    read_out,
)
from attnrx.decide.rules.metrics import OWN, RotaryDirections, directions_in, rewritten, whole_pairs
from attnrx.decide.rules.portable import portable_rules, require_uniform
from attnrx.decide.rules.rule import Rule, RulesLike, in_metric, inner_rules, keep_only, metric_of, parse_rules
from attnrx.nouns.diagnosis import Diagnosis, LayerDiagnosis
from attnrx.nouns.prescription import (
    Decision,
    HeadDecision,
    HiddenDecision,
    LayerPrescription,
    OutputDecision,
    Prescription,
    ScoreDecision,
)
from attnrx.nouns.runtime import PORTABLE_MULTIPLE
from attnrx.support.arguments import COUNT, checked, instance, optional
from attnrx.support.errors import InvalidInput, InvalidRule, MissingMoments, NoOpPrescription, NotSupported, UnknownName
from attnrx.support.optional import installed_versions
from attnrx.support.progress import track
from attnrx.support.shapes import Float, Tensor
from attnrx.support.storage import require_finite_tensors
from attnrx.vit.maps import DEPTH, HEADS, HIDDEN, LINEAR_MAPS, TOKENS, UNIT_MAPS
from attnrx.vit.models import family_of, model_fingerprint, require_all_tokens, require_ordinary_weights
from attnrx.vit.models.boundary.verbs import verb
from attnrx.vit.spec import Spectrum

# The metrics for vo, fc1 and fc2, which rank output directions:
# - centered: the mean square of the outputs on the data, with their mean subtracted.
# - weights: the plain SVD of the weight matrix, without data. For vo, it is the matrix W_O W_V of each head.
CENTERED, WEIGHTS = "centered", "weights"
OUTPUT_METRICS = (CENTERED, WEIGHTS)
# The metrics for heads:
# - centered: the error of the layer's output on the data without the head, with the output projection refitted to the
#   remaining heads. The prescription then contains this refit.
# - weights: the norm of the head's W_O W_V.
# - own: the norm of the head's strengths.
HEAD_METRICS = (CENTERED, WEIGHTS, OWN)
# The metrics for hidden units. With centered and activation, the second linear map is refitted to the kept units.
# - centered: the error of the MLP's output on the data, if units are removed one by one and the others compensate.
# - activation: the standard deviation of a unit times the norm of the weights after it.
# - weights: the norm of the weights before a unit times the norm of the weights after it.
ACTIVATION = "activation"
HIDDEN_METRICS = (CENTERED, ACTIVATION, WEIGHTS)

NEEDS = {
    CENTERED: ("output_covariance", "output_mean", "readout_gram"),
    WEIGHTS: ("value_factor", "readout_factor", "value_bias"),
    OWN: (),
}


GIVEN_RULES = "rules: a text such as 'qk=total_rank:0.5', a Rule, or a mapping from maps to them"


@checked(rules=instance(GIVEN_RULES, str, Rule, Mapping), multiple=optional(COUNT))
@verb
def prescribe(
    diagnosis: Diagnosis | nn.Module, rules: RulesLike, *, portable: bool = False, multiple: int | None = None
) -> Prescription:
    """Applies pruning rules to a diagnosis and returns the prescription.

    Args:
        diagnosis: The diagnosis of the model. If you prune only tokens or blocks, you can pass the model instead.
        rules: The rule for every map, as one text or a mapping: "qk=total_rank:0.5 vo=total_rank:0.75
            fc1=uniform_rank:0.5 tokens=ward:0.7@4,7,10". A rule without a map name applies to qk. You can add a metric
            to each rule, e.g. `uniform_rank:0.5,metric=weights` for the plain SVD. See `rules.METRICS` for qk, and
            `rules.OUTPUT_METRICS` for vo, fc1 and fc2. The rule for tokens is a token policy, or an earlier token
            prescription with trained predictors (`prescribed_tokens`). "depth=without:5,9" removes these blocks,
            counted from 1. `least_needed_blocks` finds blocks to remove.
        portable: Whether the result must fit the library's own class, so that `save` with portable=True can write a
            checkpoint for the library. Then only `hidden`, `heads` and `depth` are allowed. The number of hidden units
            is rounded to a multiple of `multiple`. All layers must keep the same number of units and of heads.
        multiple: The MLP width of a portable prescription is a multiple of this number. None means 8.

    Returns:
        The prescription, which states what every map keeps, with the reasons.

    Raises:
        NoOpPrescription: The rules keep everything.
        InvalidInput: A model was passed, but the rules need a diagnosis.
        InvalidRule: A rule has an invalid option, does not apply to its map, or removes all of a map in every layer.

    Examples:
        >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=10)
        >>> diagnosis = rx.diagnose(rx.load(vit), torch.randn(64, 3, 32, 32))
        >>> prescription = rx.prescribe(diagnosis, "qk=total_rank:0.5")
        >>> [sum(ranks) for ranks in prescription.ranks]  # of 3 heads with 64 directions, in each layer
        [96, 96]
    """
    read, tokens, depth = parse_rules(rules)
    if multiple is not None and not portable:
        raise InvalidInput(f"multiple={multiple} is that of a portable prescription: give portable=True, too.")
    if portable:
        others = [*(name for name in read if name not in UNIT_MAPS), *([] if tokens is None else [TOKENS])]
        read = portable_rules(read, others, multiple or PORTABLE_MULTIPLE)
    if isinstance(diagnosis, nn.Module):
        diagnosis = _without_readings(diagnosis, read)
    prescription = prescribe_maps(diagnosis, {**read, DEPTH: depth, TOKENS: tokens})
    if portable:
        require_uniform(prescription, multiple or PORTABLE_MULTIPLE)
        prescription = replace(prescription, about={**prescription.about, "portable": True})
    for name, rule in prescription.rules.items():
        decisions = [layer.decisions.get(name) for layer in prescription.layers]  # None: all of the map stays
        if not any(
            decision is None or any(decision.ranks if isinstance(decision, OutputDecision) else decision.keep.flatten())
            for decision in decisions
        ):
            raise InvalidRule(
                f"{name}={rule} removes all of {name} in every layer. Keep more, or make such a model on purpose with "
                "attnrx.rules.prescribe_maps."
            )
    return prescription


def _without_readings(model: nn.Module, rules: Mapping[str, Rule]) -> Diagnosis:
    """Returns a diagnosis with only the spectra, which is enough for rules about tokens and depth."""
    if rules:
        raise InvalidInput(
            "prescribe was given a model, and rules need the readings of a diagnosis: diagnose the model on images and "
            "pass the diagnosis, or give a token policy alone."
        )
    require_all_tokens(model, "prescribe for")
    require_ordinary_weights(model)
    require_finite_tensors(model.state_dict(), "the model")
    family = family_of(model)
    layers = tuple(LayerDiagnosis(layer.spectrum(), {}) for layer in family.attention(model))
    about = {"family": family.name, "data": None, "versions": installed_versions("attnrx", "torch")}
    return Diagnosis(layers, model_fingerprint(model), about)


def prescribe_maps(diagnosis: Diagnosis, rules: RulesLike, refit: bool = True) -> Prescription:
    """Returns a prescription for every map that `rules` names, in every layer.

    The rule for "heads" is applied first. The other rules then get layers without the removed heads. In the metric
    "centered", the output projection is refitted to the remaining heads. This refit becomes a decision about "vo".

    The rule for "qk" selects directions by their strengths. Depending on its metric (METRICS), these are rewritten
    directions or the model's own. Without this rule, the scores do not change. The rules for "vo", "fc1" and "fc2" use
    OUTPUT_METRICS, and the rule for "hidden" uses HIDDEN_METRICS. "depth" names the blocks to remove. "tokens" needs no
    measurement, because tokens are selected for every image at run time.

    The prescription records the rules with their metrics, and what the diagnosis records about its model and data.

    Unlike `prescribe`, this function accepts rules that remove all directions of a map, e.g. for a comparison. Without
    `refit`, the decisions about values and hidden units have no weights and cannot be realized.

    Raises:
        NoOpPrescription: The prescription changes nothing.
        InvalidInput: The diagnosis has no layers, or lacks a reading that a rule needs.
        InvalidRule: A rule does not apply to its map.
        NotSupported: A layer does not allow changes to a map, or `hidden` is combined with ranks of the MLP.
    """
    rules_by_map, tokens, depth = parse_rules(rules)
    if not diagnosis.layers:
        raise InvalidInput("prescribe found a diagnosis without layers; diagnose a model that has attention.")
    if tokens is not None:
        tokens.policy.require_depth(len(diagnosis.layers))
    _require_changeable(diagnosis, rules_by_map)
    stated = {name: _with_metric(diagnosis, name, rule) for name, rule in rules_by_map.items()}
    # If no head is removed, `of_kept` is the diagnosis itself, so its cached results (`once`) are used again.
    heads: list[HeadDecision | None] = [None] * len(diagnosis.layers)
    of_kept = diagnosis
    if HEADS in stated:
        heads = decide_heads(diagnosis, stated[HEADS])
        pairs = zip(diagnosis.layers, heads, strict=True)
        kept = tuple(replace(layer, spectrum=without_heads(layer.spectrum, removal)) for layer, removal in pairs)
        of_kept = replace(diagnosis, layers=kept)
    scores, spectra = _decide_scores(of_kept, stated.get("qk"))
    scores = [limited_to_heads(layer, removal) for layer, removal in zip(scores, heads, strict=True)]
    # Maps every map name to a list over the layers. The lists are transposed below.
    decisions_by_map: dict[str, Sequence[Decision | None]] = {"qk": scores}
    # Removed heads change vo even without a rule for vo, because the output projection is refitted to the other heads.
    if "vo" in stated or (HEADS in stated and any(heads) and output_metric(stated[HEADS], HEADS) == CENTERED):
        decisions_by_map["vo"] = decide_values(diagnosis, stated.get("vo"), heads, refit)
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
    # A layer has decisions about units only if it loses some of them.
    units = any(name in layer.decisions for layer in layers for name in UNIT_MAPS)
    drops = tokens is not None and tokens.policy.drops
    is_smaller = drops or units or depth is not None
    if not (is_smaller or any(layer.outputs for layer in layers) or any(map(_changes_scores, spectra, scores))):
        strengths = torch.cat([spectrum.strength[spectrum.used].abs().flatten() for spectrum in spectra])
        with_span = "qk" in rules_by_map and len(strengths)
        span = f" (|strength| of qk lies in {strengths.min():.3g}..{strengths.max():.3g})" if with_span else ""
        given = [f"{name}={rule}" for name, rule in rules_by_map.items()]
        given += [] if tokens is None else [f"tokens={tokens.policy}"]
        raise NoOpPrescription(
            f"{' '.join(given) or 'no rule'} would change nothing: every map keeps everything{span}, no token is "
            "removed, or (fc1, fc2) no rank saves parameters. Request a smaller rank or share, or use another rule, "
            "e.g. qk=total_rank:0.5, or tokens=ward:0.7@4,7,10."
        )
    texts = {name: str(rule) for name, rule in stated.items()}
    return Prescription(layers, texts, diagnosis.fingerprint, diagnosis.about, tokens, depth)


def _require_changeable(diagnosis: Diagnosis, names: Collection[str]) -> None:
    """Raises NotSupported if a layer does not allow changes to one of these maps, or if two maps exclude each other."""
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
                f"nothing of {' and '.join(fixed)} can be removed: layer {index + 1} has a norm over all features of "
                f"{features}. Prescribe other maps, e.g. fc1=total_rank:0.5, or tokens."
            )


def _applies(rule: Rule, name: str) -> bool:
    return name in rule.applies_to and all(_applies(part, name) for part in inner_rules(rule))


def _with_metric(diagnosis: Diagnosis, name: str, rule: Rule) -> Rule:
    """Returns the rule with its metric filled in. A rule for qk gets none if it uses the model's own directions."""
    if not _applies(rule, name):
        other = "remove_heads or total_rank:0.75" if name == HEADS else "total_rank:0.5 or energy_retention:0.9"
        raise InvalidRule(f"{name}={rule}: this rule does not apply to {name}; use e.g. {other}.")
    if name != "qk":
        return in_metric(rule, output_metric(rule, name))
    has_own_order = any(layer.spectrum.has_own_order for layer in diagnosis.layers)
    metric = metric_of(rule, defaults=not has_own_order)
    return rule if metric is None else in_metric(rule, metric)


def _decide_scores(diagnosis: Diagnosis, rule: Rule | None) -> tuple[list[ScoreDecision], list[Spectrum]]:
    """Returns every layer's decision about the scores, with the spectrum from which it selects the directions."""
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
            # If nothing is removed, the layer keeps its own directions. Rewritten ones would differ by rounding.
            spectrum, layer = own_spectra[index], replace(unchanged[index], reasons=reasons)
        elif spectrum.pairs is None:
            layer = replace(layer, basis=basis, reasons=reasons)
        else:  # the rule decides only the ranks, because a rank's best form does not contain the smaller forms
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


def output_metric(rule: Rule, name: str) -> str:
    """Returns the metric of a rule for vo, fc1, fc2, heads or hidden. If the rule sets none, returns its default.

    Raises:
        UnknownName: The metric does not exist for this map.
    """
    known, default = OUTPUT_METRICS, CENTERED
    if name == HEADS:
        first = rule
        while parts := inner_rules(first):  # the default of a combination is the default of its first part
            first = parts[0]
        known, default = HEAD_METRICS, first.head_metric
    elif name == HIDDEN:
        known = HIDDEN_METRICS
    metric = metric_of(rule) or default
    if metric not in known:
        raise UnknownName(f"metric of {name}", metric, known)
    return metric


def decide_heads(diagnosis: Diagnosis, rule: Rule) -> list[HeadDecision | None]:
    """Returns every layer's decision about its heads, or None for a layer in which all heads stay.

    The rule receives the heads of a layer as if they were the directions of a single head. In the metric "centered", a
    head's squared strength is how much the error grows when greedy elimination removes this head
    (`elimination_losses`).

    Raises:
        MissingMoments: The rule needs moments that the diagnosis lacks.
    """
    metric = output_metric(rule, HEADS)
    _require_moments(HEADS, rule, _missing(diagnosis, metric))
    spectra, readings = [], []
    for layer in diagnosis.layers:
        if metric == OWN:
            strength = (layer.spectrum.strength.double() * layer.spectrum.used).square().sum(-1).sqrt()
        elif metric == WEIGHTS:  # the Frobenius norm of W_O W_V, from its singular values
            strength = _value_directions(layer, metric).strength.square().sum(-1).sqrt()
        else:
            covariance = layer.reading("output_covariance").flatten(0, 1)
            strength = elimination_losses(covariance, layer.reading("readout_gram")).sqrt()
        identity = torch.eye(len(strength), dtype=torch.float64)[None]  # rules read strengths, but a spectrum has rows
        spectra.append(_spectrum(identity, identity, strength[None], (0,), HEADS))
        numbers = torch.tensor([layer.spectrum.heads])  # in the original model
        readings.append({**layer.readings, "heads": numbers})  # including the readings for pairs of heads
    decided = _decided(rule, diagnosis, spectra, readings)
    decisions = [
        HeadDecision(decision.keep[0], spectrum.strength[0], metric_reasons(decision, metric))
        for decision, spectrum in zip(decided, spectra, strict=True)
    ]
    return [None if bool(decision.keep.all()) else decision for decision in decisions]


def decide_values(
    diagnosis: Diagnosis, rule: Rule | None, heads: Sequence[HeadDecision | None], refit: bool = True
) -> list[OutputDecision | None]:
    """Returns every layer's decision about its values, or None for a layer in which all value dimensions stay.

    Without a rule, kept heads keep all their value dimensions, and the output projection is refitted to these heads.

    In the metric "centered", a head's directions balance the covariance of its output with its part of the output
    projection (as in balanced truncation). A squared strength is the error of removing the direction while all other
    heads stay unchanged. The output projection is then refitted to the kept directions of all heads together.

    In the metric "weights", the directions are the singular vectors of each head's W_O W_V. Nothing is refitted, and
    the value bias is kept.

    The refit takes most of the time. Without `refit`, the decisions have no output projection and cannot be realized.

    Raises:
        MissingMoments: The rule needs moments that the diagnosis lacks.
    """
    metric = CENTERED if rule is None else output_metric(rule, "vo")
    if rule is not None:
        _require_moments("vo", rule, _missing(diagnosis, metric))
    balanced: list[Balanced] = diagnosis.once(
        ("value directions", metric), lambda: [_value_directions(layer, metric) for layer in diagnosis.layers]
    )
    tables = [_value_spectrum(table, layer, metric) for table, layer in zip(balanced, diagnosis.layers, strict=True)]
    spectra = [without_heads(table, removal) for table, removal in zip(tables, heads, strict=True)]
    if rule is None:
        decided = [keep_only(spectrum, spectrum.used) for spectrum in spectra]
    else:
        decided = _decided(rule, diagnosis, spectra)
    decisions: list[OutputDecision | None] = []
    for index, (layer, directions) in enumerate(zip(diagnosis.layers, balanced, strict=True)):
        decision = limited_to_heads(decided[index], heads[index])
        if bool((decision.keep | ~tables[index].used).all()):
            decisions.append(None)
            continue
        is_centered = metric == CENTERED
        covariance = layer.reading("output_covariance").flatten(0, 1) if is_centered else None
        # Constant outputs need no direction. The constant is the mean output or, in the metric "weights", the value
        # bias. Attention passes the value bias unchanged, because its rows sum to 1.
        center = layer.reading("output_mean" if is_centered else "value_bias").double().flatten()
        kept = int(decision.keep.sum())
        weight = read_out(directions, decision.keep, covariance) if refit else _no_weight(len(center), kept)
        reasons = metric_reasons(decision, metric)
        encode = directions.left[decision.keep]
        decisions.append(OutputDecision(decision.ranks, encode, weight, center, directions.strength, reasons))
    return decisions


def _require_moments(name: str, rule: Rule, missing: Collection[str]) -> None:
    if missing:
        raise MissingMoments(
            f"{name}={rule} needs {', '.join(sorted(missing))}, which the diagnosis does not have: diagnose again with "
            "Moments() among the diagnostics (attnrx diagnose --moments), or use metric=weights, which needs no data."
        )


def _missing(diagnosis: Diagnosis, metric: str) -> set[str]:
    return {name for layer in diagnosis.layers for name in NEEDS[metric] if name not in layer.readings}


def without_heads(spectrum: Spectrum, heads: HeadDecision | None) -> Spectrum:
    """Returns a layer's spectrum without the directions of removed heads."""
    return spectrum if heads is None else replace(spectrum, used=spectrum.used & heads.keep[:, None])


def limited_to_heads(decision: ScoreDecision, heads: HeadDecision | None) -> ScoreDecision:
    """Returns the decision without the directions of removed heads. Their reasons say that the head is removed."""
    if heads is None:
        return decision
    is_kept = heads.keep.tolist()
    reasons = (why if keep else "the head is removed" for why, keep in zip(decision.reasons, is_kept, strict=True))
    return replace(decision, keep=decision.keep & heads.keep[:, None], reasons=tuple(reasons))


def decide_linear(diagnosis: Diagnosis, name: str, rule: Rule) -> list[OutputDecision | None]:
    """Returns every MLP's decision about one map, or None if two factors would not have fewer parameters than the map.

    Raises:
        InvalidRule: A layer has no MLP of two linear maps.
    """
    metric = output_metric(rule, name)
    if any(len(layer.mlp) != 2 for layer in diagnosis.layers):
        raise InvalidRule(
            f"{name}={rule} needs an MLP of two linear maps in every layer, which the model does not have; omit {name}."
        )
    maps = [layer.mlp[LINEAR_MAPS.index(name)] for layer in diagnosis.layers]
    entries = {index: entry for index, entry in enumerate(maps) if entry is not None}
    missing = {"the moments of its map" for entry in entries.values() if metric not in entry.metrics}
    _require_moments(name, rule, missing)
    tables = [entry.metrics[metric] for entry in entries.values()]
    spectra = [
        _spectrum(table.directions[None], table.directions[None], table.strength[None], (0,), name) for table in tables
    ]
    decisions: list[OutputDecision | None] = [None] * len(maps)
    # Only diagnosed layers are included. A rule with scope="model" distributes its total over these layers.
    decided = _decided(rule, diagnosis, spectra)
    for (index, entry), decision, table in zip(entries.items(), decided, tables, strict=True):
        (rank,) = decision.ranks
        if 0 < rank and pays(rank, table.directions.shape[1], entry.inputs):
            # Output directions are orthonormal rows, so the decoder is the transposed encoder. It is a copy, because
            # files cannot hold tensors that share memory.
            encode, reasons = table.directions[decision.keep[0]].double(), metric_reasons(decision, metric)
            factors = encode, encode.mT.clone(), table.center, table.strength[None]
            decisions[index] = OutputDecision((rank,), *factors, reasons)
    return decisions


def decide_hidden(diagnosis: Diagnosis, rule: Rule, refit: bool = True) -> list[HiddenDecision | None]:
    """Returns every MLP's decision about its hidden units, or None for a layer in which all of them stay.

    The rule receives the hidden units of an MLP as if they were the directions of a single head. The refit takes most
    of the time. Without `refit`, the decisions have no weights for the second map and cannot be realized.

    Raises:
        InvalidRule: A layer's MLP is not two linear maps (one matrix each) with only an activation between them.
    """
    metric = output_metric(rule, HIDDEN)
    units = [layer.hidden for layer in diagnosis.layers]
    entries = [entry for entry in units if entry is not None]
    if len(entries) < len(units):
        raise InvalidRule(
            f"hidden={rule} needs an MLP of two linear maps, each one matrix, with only an activation between them, in "
            "every layer, which the model does not have; omit hidden."
        )
    _require_moments(
        HIDDEN, rule, {"the moments of the hidden units" for each in entries if metric not in each.strength}
    )
    strengths = [entry.strength[metric][None] for entry in entries]
    # The rows have no features. An identity matrix for all hidden units would be large, and no rule reads it.
    rows = [strength.new_zeros(*strength.shape, 0) for strength in strengths]
    spectra = [_spectrum(empty, empty, strength, (0,), HIDDEN) for empty, strength in zip(rows, strengths, strict=True)]
    decisions: list[HiddenDecision | None] = []
    for decision, entry in zip(_decided(rule, diagnosis, spectra), entries, strict=True):
        keep, weight, bias = decision.keep[0], entry.weight.double(), entry.bias.double()
        if bool(keep.all()):
            decisions.append(None)
            continue
        new_weight = weight[:, keep] if refit else _no_weight(len(weight), int(keep.sum()))
        if metric != WEIGHTS and refit:
            assert entry.covariance is not None and entry.mean is not None
            new_weight, mean = compensated(entry.covariance, weight, keep), entry.mean.double()
            # The refit uses activations minus their means, so the bias must keep the mean output.
            bias = bias + weight @ mean - new_weight @ mean[keep]
        reasons = metric_reasons(decision, metric)
        decisions.append(HiddenDecision(keep, entry.strength[metric], new_weight, bias, reasons))
    return decisions


def _no_weight(outputs: int, kept: int) -> Float[Tensor, "outputs kept"]:
    """Returns zeros in place of a weight that is never read."""
    # NumPy allocates zeros without touching the memory. Real weights for all levels of a ViT-L would take gigabytes.
    return torch.from_numpy(np.zeros((outputs, kept)))


def metric_reasons(decision: ScoreDecision, metric: str) -> tuple[str, ...]:
    return tuple(f"{reason}; metric {metric}" for reason in decision.reasons)


def _value_directions(layer: LayerDiagnosis, metric: str) -> Balanced:
    if metric == WEIGHTS:
        return factor_directions(layer.reading("value_factor"), layer.reading("readout_factor"))
    covariance = layer.reading("output_covariance").double()  # [heads, v_head_dim, heads * v_head_dim]
    # Every head's own covariance: [heads, v_head_dim, v_head_dim].
    blocks = covariance.unflatten(2, covariance.shape[:2]).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    return balance(blocks, layer.reading("readout_gram"))


def _value_spectrum(directions: Balanced, layer: LayerDiagnosis, metric: str) -> Spectrum:
    """Returns the spectrum of a layer's value directions. Each head has as many directions as it has value features."""
    spectrum = _spectrum(directions.left, directions.right, directions.strength, layer.spectrum.heads, "vo")
    # Readings are padded with zeros to the widest head. A feature is padding if it has neither values nor columns in
    # the output projection. Directions are sorted by strength, so those that combine only padding come last.
    names, others = (NEEDS[WEIGHTS][:2], 1) if metric == WEIGHTS else (("output_covariance", "readout_gram"), 2)
    sizes = torch.stack([layer.reading(name).abs().sum(others) for name in names])  # [2, heads, features]
    num_features = (sizes > 0).any(0).sum(-1)
    return replace(spectrum, used=torch.arange(spectrum.used.shape[1]) < num_features[:, None])


def _spectrum(
    left: Tensor, right: Tensor, strength: Float[Tensor, "units directions"], units: tuple[int, ...], name: str
) -> Spectrum:
    used = torch.ones_like(strength, dtype=torch.bool)
    return Spectrum(left, right, strength.double(), used, 1.0, "none", units, name)


def _decided(
    rule: Rule, diagnosis: Diagnosis, spectra: Sequence[Spectrum], readings: Sequence[Mapping[str, Tensor]] = ()
) -> list[ScoreDecision]:
    """Returns a rule's decisions about a map other than qk.

    The rule receives a diagnosis in which this map's spectra replace the score spectra.
    """
    readings = readings or [{}] * len(spectra)
    layers = tuple(LayerDiagnosis(*parts) for parts in zip(spectra, readings, strict=True))
    view = replace(diagnosis, layers=layers)
    return [rule.decide(view, index) for index in range(len(layers))]
