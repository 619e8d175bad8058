"""From a diagnosis and a rule to a prescription."""

import math
from collections.abc import Mapping
from dataclasses import replace

import torch

from attnrx.diagnosis import Diagnosis
from attnrx.errors import InvalidInput, InvalidRule, NothingChanged
from attnrx.prescription import LayerPrescription, Prescription, TokenPrescription
from attnrx.rules.bounds import score_bound
from attnrx.rules.deciding import keep_only
from attnrx.rules.metrics import OWN
from attnrx.rules.outputs import decide_mlp, decide_values, output_metric, with_metric
from attnrx.rules.rewriting import rewritten
from attnrx.rules.rule import Rule, metric_of, readings_needed
from attnrx.spectrum import Spectrum


def prescribe(
    diagnosis: Diagnosis,
    rule: Rule | None = None,
    metric: str | None = None,
    *,
    values: Rule | None = None,
    mlp: Rule | None = None,
    tokens: TokenPrescription | None = None,
) -> Prescription:
    """Lets the rule decide about every layer; rules that would leave the model as it is raise NothingChanged.

    With a `metric`, given here or by the rule, the rule decides about the directions that are the best ones in that
    metric instead of the model's own, by their strengths there (see METRICS). `values` decides in the same way about
    what the heads read out, and `mlp` about the two maps of every MLP, each in the metric that its rule states
    (OUTPUT_METRICS; by default "centered", that of the data); `rule` may then be None, and the scores stay as they
    are. `tokens` says which tokens leave between the layers, which needs no reading, as it is decided anew for every
    image. The prescription records the rules and their metrics, everything the diagnosis says about its model and
    data, and under `score_bounds` how far the mask can move the scores of each head on the same tokens (Theorem 1), or
    null where there is no such law.
    """
    _require_askable(diagnosis, (rule, values, mlp), tokens)
    layers, spectra = _decide_scores(diagnosis, rule, metric)
    if values is not None:
        layers = [
            replace(layer, values=own) for layer, own in zip(layers, decide_values(diagnosis, values), strict=True)
        ]
    if mlp is not None:
        layers = [replace(layer, mlp=own) for layer, own in zip(layers, decide_mlp(diagnosis, mlp), strict=True)]
    if not (tokens is not None and tokens.policy.drops) and not any(map(_changes, spectra, layers)):
        raise NothingChanged(_nothing(spectra, layers, {"rule": rule, "values": values, "mlp": mlp}, tokens))
    bounds = [score_bound(spectrum, layer).tolist() for spectrum, layer in zip(spectra, layers, strict=True)]
    known = [[bound if math.isfinite(bound) else None for bound in heads] for heads in bounds]
    rules = {} if rule is None else {"scores": {"rule": str(rule), "metric": _metric(diagnosis, rule, metric)}}
    outputs = {"values": values, "mlp": mlp}
    rules |= {
        name: {"rule": str(own), "metric": output_metric(own, name)} for name, own in outputs.items() if own is not None
    }
    about = {**diagnosis.about, "score_bounds": known}
    return Prescription(tuple(layers), rules, diagnosis.fingerprint, about, tokens)


def _metric(diagnosis: Diagnosis, rule: Rule | None, metric: str | None) -> str:
    """Gives the stated metric, or the rule's default; forms with norms (SVDA) have only their own strengths."""
    stated = metric_of(rule) if metric is None and rule is not None else metric
    if stated is not None:
        return stated
    if rule is None or any(layer.spectrum.norms != "none" for layer in diagnosis.layers):
        return OWN
    return metric_of(rule, defaults=True) or OWN


def _decide_scores(
    diagnosis: Diagnosis, rule: Rule | None, metric: str | None
) -> tuple[list[LayerPrescription], list[Spectrum]]:
    """Gives the decision about every layer's scores and the spectrum it is about; what stays whole stays itself."""
    own = [layer.spectrum for layer in diagnosis.layers]
    whole = [keep_only(spectrum, spectrum.used) for spectrum in own]
    if rule is None:
        return whole, own
    require_readings(diagnosis, rule)
    chosen = _metric(diagnosis, rule, metric)
    if chosen == OWN:
        return [rule.decide(diagnosis, layer) for layer in range(len(own))], own
    told, bases = rewritten(diagnosis, chosen)
    layers, spectra = [], []
    for index, basis in enumerate(bases):
        spectrum, layer = told.layers[index].spectrum, rule.decide(told, index)
        if layer.basis is not None:
            raise InvalidRule(f"{rule} rewrites the directions itself; leave metric={chosen!r} out.")
        changed = _changes(spectrum, layer)
        reasons = with_metric(layer, chosen, told.layers[index].readings["metric_rank"].tolist())
        layers.append(
            replace(layer, basis=basis, reasons=reasons) if changed else replace(whole[index], reasons=reasons)
        )
        spectra.append(spectrum if changed else own[index])
    return layers, spectra


def require_readings(diagnosis: Diagnosis, rule: Rule) -> None:
    """Refuses a diagnosis that lacks a reading which the rule needs, before anything is decided."""
    for index, layer in enumerate(diagnosis.layers):
        missing = [name for name in readings_needed(rule) if name not in layer.readings]
        if missing:
            raise InvalidRule(
                f"{rule} needs {' and '.join(missing)}, which the diagnosis of layer {index} does not have; it has "
                f"{', '.join(sorted(layer.readings)) or 'none'}. Diagnose again with the diagnostics that give them."
            )


def _changes(spectrum: Spectrum, layer: LayerPrescription) -> bool:
    if layer.values is not None or any(output is not None for output in layer.mlp):
        return True
    if layer.keep.shape != spectrum.used.shape:  # directions of another kind altogether
        return True
    loses = bool((spectrum.used & ~layer.keep).any()) or not bool(layer.heads.all())
    return loses or bool((layer.strength.double() != spectrum.strength.double())[spectrum.used].any())


def _require_askable(diagnosis: Diagnosis, rules: tuple[Rule | None, ...], tokens: TokenPrescription | None) -> None:
    for asked in rules:
        if asked is not None and not isinstance(asked, Rule):
            raise InvalidInput(
                f"prescribe was given {asked!r} for a rule; use e.g. EnergyRetention(0.9) or parse_rule(text)."
            )
    if not diagnosis.layers:
        raise InvalidInput("prescribe found a diagnosis without layers; diagnose a model that has attention.")
    if tokens is not None:
        tokens.policy.require_depth(len(diagnosis.layers))


# What a rule that changes no value and no MLP map found; scores have their own message, with the span of strengths.
UNCHANGED = {
    "values": "every head keeps everything it reads out",
    "mlp": "every map keeps its rank, or has no rank below outputs * inputs / (outputs + inputs), where factors pay",
}


def _nothing(
    spectra: list[Spectrum],
    layers: list[LayerPrescription],
    rules: Mapping[str, Rule | None],
    tokens: TokenPrescription | None,
) -> str:
    if not any(rules.values()):
        told = "neither a rule nor a policy was given" if tokens is None else f"{tokens.policy} lets no token leave"
        return f"{told}, so nothing would change: give a rule, or tokens='evit:0.7@4,7,10'."
    found = [
        f"{name}={str(rules[name])!r} would change nothing: {why}" for name, why in UNCHANGED.items() if rules[name]
    ]
    found = [_no_score(spectra, layers, rules["rule"]), *found] if rules["rule"] else found
    return f"{'; '.join(found)}. Ask for a smaller rank or share, or use another rule."


def _no_score(spectra: list[Spectrum], layers: list[LayerPrescription], rule: Rule | None) -> str:
    strengths = torch.cat([spectrum.strength[spectrum.used].abs().flatten() for spectrum in spectra])
    span = (
        f"|strength| lies in {strengths.min():.3g}..{strengths.max():.3g}"
        if len(strengths)
        else "there are no directions"
    )
    first = next((layer.reasons[0] for layer in layers if layer.reasons), "there are no heads")
    heads = sum(len(layer.reasons) for layer in layers)
    return (
        f"{rule} would change nothing: all {heads} heads of {len(layers)} layers keep everything ({span}; "
        f"the first head {first})"
    )
