"""The prescription: the rules, and one reason per head."""

from typing import Any

from attnrx.prescription import LayerPrescription
from attnrx.reports.content import ReportContent
from attnrx.reports.numbers import number, percent, plain
from attnrx.reports.sections.section import Section


def treatment(content: ReportContent) -> Section | None:
    """Returns the prescription head by head."""
    prescription = content.prescription
    if prescription is None:
        return None
    names = original_heads(content)
    data = {
        "rules": list(prescription.rules.items()),
        "removed": percent(prescription.removed_share),
        "fingerprint": prescription.fingerprint,
        "layers": [_layer(index, layer, names[index]) for index, layer in enumerate(prescription.layers)],
    }
    return Section("prescription", "Prescription", data)


def original_heads(content: ReportContent) -> list[tuple[int, ...]]:
    """Returns the original head indices of every layer, from the diagnosis; without one, consecutive indices."""
    if content.diagnosis is not None:
        return [layer.spectrum.heads for layer in content.diagnosis.layers]
    layers = content.prescription.layers if content.prescription is not None else ()
    return [tuple(range(layer.qk.keep.shape[0])) for layer in layers]


def _layer(index: int, layer: LayerPrescription, names: tuple[int, ...]) -> dict[str, Any]:
    scores = layer.qk
    rows = [
        {"head": head, "keeps": number(rank), "stays": bool(is_kept), "why": why}
        for head, rank, is_kept, why in zip(names, scores.ranks, scores.heads, scores.reasons, strict=True)
    ]
    removed = percent(1 - scores.kept / scores.directions if scores.directions else None)
    keeps = f"heads keep {plain(list(scores.ranks), 16)} of {scores.keep.shape[1]}"
    if scores.is_shared:
        keeps = f"the heads share {number(scores.kept)} of {number(scores.directions)}"
    others = [(name, why) for name, output in layer.outputs.items() for why in output.reasons]
    return {"index": index, "rows": rows, "removed": removed, "keeps": keeps, "others": others}
