"""What was prescribed, and why: the rule, the data it decided on, and one reason per head."""

from collections.abc import Mapping
from typing import Any

from attnrx.prescription import LayerPrescription, OutputPrescription, Prescription
from attnrx.reports.content import ReportContent
from attnrx.reports.numbers import number, percent, plain
from attnrx.reports.sections.section import Section

OTHERS = (("values_rule", "the values"), ("mlp_rule", "the MLP"), ("tokens", "the tokens"))


def treatment(content: ReportContent) -> Section | None:
    """Gives the prescription head by head."""
    prescription = content.prescription
    if prescription is None:
        return None
    names = original_heads(content)
    data = {
        "rule": rule_text(prescription) if prescription.rule else "",
        "others": [(words, _stated(prescription, name)) for name, words in OTHERS if name in prescription.about],
        "removed": percent(prescription.removed_share),
        "fingerprint": prescription.fingerprint,
        "layers": [_layer(index, layer, names[index]) for index, layer in enumerate(prescription.layers)],
    }
    return Section("prescription", "Prescription", data)


def _stated(prescription: Prescription, name: str) -> str:
    """Returns a rule as text with the metric it decided in."""
    metric = prescription.about.get(name.replace("rule", "metric"))
    return f"{prescription.about[name]}" + (f" in the metric {metric}" if metric and name != "tokens" else "")


def original_heads(content: ReportContent) -> list[tuple[int, ...]]:
    """Gives, for every layer, which head of the original model each row is, which only the diagnosis knows for sure."""
    if content.diagnosis is not None:
        return [layer.spectrum.heads for layer in content.diagnosis.layers]
    layers = content.prescription.layers if content.prescription is not None else ()
    return [tuple(range(layer.keep.shape[0])) for layer in layers]


def rule_text(prescription: Prescription) -> str:
    """Gives the rule as it was asked for, or spelled out from its knobs."""
    return str(prescription.about.get("rule") or describe_rule(prescription.rule))


def describe_rule(rule: Mapping[str, Any]) -> str:
    """Writes a rule as it would be built, EnergyRetention(rho=0.9)."""
    knobs = ", ".join(f"{name}={_knob(value)}" for name, value in rule.items() if name != "type")
    return f"{rule.get('type', 'rule')}({knobs})"


def _knob(value: Any) -> str:
    if isinstance(value, Mapping):
        inside = value.get("tuple")
        return describe_rule(value) if inside is None else f"({', '.join(_knob(item) for item in inside)})"
    return plain(value)


def _layer(index: int, layer: LayerPrescription, names: tuple[int, ...]) -> dict[str, Any]:
    rows = [
        {"head": head, "keeps": number(rank), "stays": bool(stays), "why": why}
        for head, rank, stays, why in zip(names, layer.ranks, layer.heads, layer.reasons, strict=True)
    ]
    removed = percent(1 - layer.kept / layer.directions if layer.directions else None)
    keeps = f"heads keep {plain(list(layer.ranks), 16)} of {layer.keep.shape[1]}"
    if layer.is_shared:
        keeps = f"the heads share {number(layer.kept)} of {number(layer.directions)}"
    others = [(words, why) for words, output in _outputs(layer) for why in output.reasons]
    return {"index": index, "rows": rows, "removed": removed, "keeps": keeps, "others": others}


def _outputs(layer: LayerPrescription) -> list[tuple[str, OutputPrescription]]:
    """Gives what is prescribed for the other maps of a layer, each by its name."""
    named = (("values", layer.values), ("fc1", layer.mlp[0]), ("fc2", layer.mlp[1]))
    return [(name, output) for name, output in named if output is not None]
