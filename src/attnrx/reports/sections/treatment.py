"""What was prescribed, and why: the rule, the data it decided on, and one reason per head."""

from typing import Any

from attnrx.prescription import LayerPrescription, OutputPrescription, Prescription
from attnrx.reports.content import ReportContent
from attnrx.reports.numbers import number, percent, plain
from attnrx.reports.sections.section import Section

OTHERS = {"values": "the values", "mlp": "the MLP"}


def treatment(content: ReportContent) -> Section | None:
    """Gives the prescription head by head."""
    prescription = content.prescription
    if prescription is None:
        return None
    names = original_heads(content)
    data = {
        "rule": rule_text(prescription, "scores"),
        "others": [
            *((words, rule_text(prescription, name)) for name, words in OTHERS.items() if name in prescription.rules),
            *(() if prescription.tokens is None else [("the tokens", str(prescription.tokens.policy))]),
        ],
        "removed": percent(prescription.removed_share),
        "fingerprint": prescription.fingerprint,
        "layers": [_layer(index, layer, names[index]) for index, layer in enumerate(prescription.layers)],
    }
    return Section("prescription", "Prescription", data)


def original_heads(content: ReportContent) -> list[tuple[int, ...]]:
    """Gives, for every layer, which head of the original model each row is, which only the diagnosis knows for sure."""
    if content.diagnosis is not None:
        return [layer.spectrum.heads for layer in content.diagnosis.layers]
    layers = content.prescription.layers if content.prescription is not None else ()
    return [tuple(range(layer.keep.shape[0])) for layer in layers]


def rule_text(prescription: Prescription, of: str) -> str:
    """Returns the rule and the metric that decided about a map, "" where none did."""
    found = prescription.rules.get(of)
    if found is None:
        return ""
    return found["rule"] if found["metric"] == "own" else f"{found['rule']} in the metric {found['metric']}"


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
