"""Spectra: the directions of every head by decreasing energy, with the cut between kept and pruned ones."""

from typing import Any

from attnrx.diagnosis import LayerDiagnosis
from attnrx.prescription import ScoreDecision
from attnrx.reports.content import ReportContent
from attnrx.reports.figures import SpectrumBars
from attnrx.reports.numbers import percent
from attnrx.reports.sections.section import Figure, Section

OPEN_PANELS = 32  # with more panels only the first layer is unfolded initially


def spectra(content: ReportContent) -> Section | None:
    """Returns one panel per head, grouped by layer."""
    if content.diagnosis is None:
        return None
    diagnosed = content.diagnosis.layers
    prescription = content.prescription
    prescribed = [None] * len(diagnosed) if prescription is None else [layer.qk for layer in prescription.layers]
    layers = [_layer(own, plan) for own, plan in zip(diagnosed, prescribed, strict=True)]
    panels = sum(len(layer) for layer in layers)
    data = {
        "layers": layers,
        "open": len(layers) if panels <= OPEN_PANELS else 1,
        "cut": content.prescription is not None,
    }
    return Section("spectra", "Spectra", data)


def _layer(diagnosis: LayerDiagnosis, plan: ScoreDecision | None) -> list[Figure]:
    spectrum = diagnosis.spectrum
    keep = spectrum.used if plan is None else plan.keep & plan.heads[:, None]
    rows = zip(spectrum.heads, spectrum.energy, keep, spectrum.used, strict=True)
    return [_panel(head, energy[used].tolist(), keep[used].tolist()) for head, energy, keep, used in rows]


def _panel(head: int, energies: list[float], keep: list[Any]) -> Figure:
    bars = SpectrumBars(f"Spectrum of head {head}", energies, keep)
    note = f"{sum(keep)} of {len(keep)} · {percent(bars.kept_energy)}"
    return Figure(bars.draw(), f"head {head}", note)
