"""Applies rules to vo, fc1 and fc2."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from attnrx.decompositions import Balanced, balance, factor_directions
from attnrx.decompositions.low_rank import pays
from attnrx.decompositions.output_projection import Circuit, read_out
from attnrx.diagnosis import Diagnosis, LayerDiagnosis, MapDiagnosis
from attnrx.diagnostics import SpectralShape
from attnrx.errors import InvalidRule, UnknownName
from attnrx.maps import LINEAR_MAPS
from attnrx.prescription import OutputDecision, ScoreDecision
from attnrx.rules.decisions import NO_STRENGTH
from attnrx.rules.metrics import METRICS, OWN
from attnrx.rules.rule import Rule, inner_rules, metric_of
from attnrx.shapes import Float, Tensor
from attnrx.spectrum import Spectrum

# The metrics of vo, fc1 and fc2. centered: the mean square of the outputs about their mean on the data. weights: the
# plain SVD of the weight matrix (for vo: of W_O W_V per head, TruncAtt), without data.
CENTERED, WEIGHTS = "centered", "weights"
OUTPUT_METRICS = (CENTERED, WEIGHTS)

NEEDS = {
    CENTERED: ("output_covariance", "output_mean", "readout_gram"),
    WEIGHTS: ("value_factor", "readout_factor", "value_bias"),
}
REMEDY = (
    "diagnose again with Moments() among the diagnostics (attnrx diagnose --moments), or use metric=weights, which "
    "needs no data."
)


def output_metric(rule: Rule, of: str) -> str:
    """Returns the metric of a rule for one of OUTPUT_MAPS: the one it states, or "centered".

    Raises:
        UnknownName: The metric does not exist.
        InvalidRule: The metric or the rule applies to scores only.
    """
    if _is_scores_only(rule):
        raise InvalidRule(
            f"{of}={rule} applies to qk only; for {of} use e.g. total_rank:0.5, "
            "uniform_rank:0.5 or energy_retention:0.9."
        )
    metric = metric_of(rule) or CENTERED
    if metric in OUTPUT_METRICS:
        return metric
    if metric in (OWN, *METRICS):
        raise InvalidRule(
            f"{of}={rule}: the metric {metric!r} exists for qk only; for {of} choose one of "
            f"{', '.join(OUTPUT_METRICS)}, or omit it ({CENTERED})."
        )
    raise UnknownName(f"metric of {of}", metric, OUTPUT_METRICS)


def decide_outputs(diagnosis: Diagnosis, name: str, rule: Rule) -> list[OutputDecision | None]:
    """Returns the decision about one of OUTPUT_MAPS in every layer; None where the map does not change."""
    return _decide_values(diagnosis, rule) if name == "vo" else _decide_linear(diagnosis, name, rule)


def _decide_values(diagnosis: Diagnosis, rule: Rule) -> list[OutputDecision | None]:
    """Returns the decision about the values of every layer; None where all value dimensions are kept.

    In the metric "centered", the directions of a head are balanced between the covariance of its output and its part of
    the output projection, so that a squared strength is the error of removing the direction from that head alone. The
    output projection is then refit to the kept directions of all heads together. In "weights" the directions are the
    singular vectors of every head's W_O W_V; nothing is refit, and the value bias is kept.
    """
    metric = output_metric(rule, "vo")
    missing = sorted({name for layer in diagnosis.layers for name in NEEDS[metric] if name not in layer.readings})
    if missing:
        raise InvalidRule(f"vo={rule} needs {', '.join(missing)}, which the diagnosis does not have: {REMEDY}")
    found = [_value_directions(layer, metric) for layer in diagnosis.layers]
    spectra = [
        _spectrum(each.left, each.right, each.strength, layer.spectrum.heads, "vo")
        for each, layer in zip(found, diagnosis.layers, strict=True)
    ]
    view = _view(diagnosis, spectra)
    decisions: list[OutputDecision | None] = []
    for index, (layer, directions) in enumerate(zip(diagnosis.layers, found, strict=True)):
        decision = rule.decide(view, index)
        if bool(decision.keep.all()) or not decision.heads.numel():
            decisions.append(None)
            continue
        circuit = _circuit(layer, metric)
        reduced = read_out(circuit, directions, decision.keep, joint=metric == CENTERED)
        decisions.append(
            OutputDecision(
                decision.ranks,
                torch.cat(reduced.projection),
                reduced.weight,
                circuit.mean,
                directions.strength,
                metric_reasons(decision, metric, directions.rank),
            )
        )
    return decisions


def _decide_linear(diagnosis: Diagnosis, name: str, rule: Rule) -> list[OutputDecision | None]:
    """Returns the rank of one map of every MLP; None where two factors would have no fewer parameters."""
    metric = output_metric(rule, name)
    if any(len(layer.mlp) != 2 for layer in diagnosis.layers):
        raise InvalidRule(
            f"{name}={rule} needs an MLP of two linear maps in every layer, which the model does not have; omit {name}."
        )
    maps = [layer.mlp[LINEAR_MAPS.index(name)] for layer in diagnosis.layers]
    present = [found for found in maps if found is not None]
    if any(metric not in found.metrics for found in present):
        raise InvalidRule(f"{name}={rule} needs the moments of its map, which the diagnosis does not have: {REMEDY}")
    tables = [found.metrics[metric] for found in present]
    spectra = [_spectrum(own.directions[None], own.directions[None], own.strength[None], (0,), name) for own in tables]
    view = _view(replace(diagnosis, layers=diagnosis.layers[: len(present)]), spectra)
    decisions = iter([_decide_map(rule, view, index, found, metric) for index, found in enumerate(present)])
    return [None if found is None else next(decisions) for found in maps]


def metric_reasons(decision: ScoreDecision, metric: str, ranks: Sequence[int]) -> tuple[str, ...]:
    """Returns the reasons of a decision, extended by its metric; `ranks` are the ranks of the head or map in that
    metric.
    """
    dead = f"; {NO_STRENGTH}"
    return tuple(
        f"{reason}{'' if rank or dead in reason else dead}; metric {metric}"
        for reason, rank in zip(decision.reasons, ranks, strict=True)
    )


def _decide_map(rule: Rule, view: Diagnosis, index: int, found: MapDiagnosis, metric: str) -> OutputDecision | None:
    decision, own = rule.decide(view, index), found.metrics[metric]
    (rank,) = decision.ranks
    if not 0 < rank or not pays(rank, own.directions.shape[1], found.inputs):
        return None
    kept = own.directions[decision.keep[0]].double()
    return OutputDecision(
        (rank,), kept, kept.mT, own.center, own.strength[None], metric_reasons(decision, metric, (rank,))
    )


def _circuit(layer: LayerDiagnosis, metric: str) -> Circuit:
    """Returns the identity on the value dimensions with their statistics; for "weights" only a center is known."""
    center = layer.reading("output_mean" if metric == CENTERED else "value_bias").double()
    size = center.numel()
    covariance = layer.reading("output_covariance") if metric == CENTERED else center.new_zeros(size, size)
    identity = torch.eye(size, dtype=center.dtype)
    return Circuit(identity, None, covariance.double().reshape(size, size), center.flatten(), len(center))


def _is_scores_only(rule: Rule) -> bool:
    return rule.scores_only or any(_is_scores_only(part) for part in inner_rules(rule))


def _value_directions(layer: LayerDiagnosis, metric: str) -> Balanced:
    if metric == WEIGHTS:
        return factor_directions(layer.reading("value_factor"), layer.reading("readout_factor"))
    heads, size = layer.reading("output_mean").shape
    covariance = layer.reading("output_covariance").double().reshape(heads, size, heads, size)
    own = covariance.diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    return balance(own, layer.reading("readout_gram"))


def _spectrum(
    left: Tensor, right: Tensor, strength: Float[Tensor, "units directions"], units: tuple[int, ...], of: str
) -> Spectrum:
    used = torch.ones_like(strength, dtype=torch.bool)
    return Spectrum(left, right, strength.double(), used, 1.0, "none", units, of)


def _view(diagnosis: Diagnosis, spectra: list[Spectrum]) -> Diagnosis:
    """Returns a diagnosis with the spectra of another map in place of the scores, as input of a rule."""
    shape: Callable[[Spectrum], dict[str, Tensor]] = SpectralShape().measure
    return replace(diagnosis, layers=tuple(LayerDiagnosis(spectrum, shape(spectrum)) for spectrum in spectra))
