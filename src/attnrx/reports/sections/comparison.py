"""The comparison: the accuracy loss of every method over its costs, as curves with bands, and a table."""

from collections.abc import Mapping
from typing import Any

from attnrx.reports.comparison import ComparedPair, ComparedTrial, ComparisonRecord, Measured
from attnrx.reports.content import ReportContent
from attnrx.reports.figures import Chart, Curve, CurvePoint, marker_picture
from attnrx.reports.numbers import MISSING, interval, known, percent, plain, quantity, short, with_unit
from attnrx.reports.sections.section import Figure, Section

STYLES = 6
# The charts: field, heading, axis label, unit, whether the scale may be logarithmic.
MEASURES = (
    ("change", "Change of top-1 accuracy", "points", "points", False),
    ("agreement", "Agreement with the original", "% of the images", "%", False),
    ("divergence", "Divergence from the original", "KL in nats", "nats", True),
)
LEAST_SPREAD = 5.0  # values that differ by less than this factor have a linear scale
NOUGHT = 1e-6  # nats: smaller divergences are rounding errors of zero


def comparison(content: ReportContent) -> Section | None:
    """Returns one chart per measure over the MACs, one curve per method, and the table of all trials."""
    found = content.comparison
    if found is None:
        return None
    charts = [chart for chart in (_chart(found, *measure) for measure in MEASURES) if chart.curves]
    names = {name: curve for chart in charts for name, curve in ((curve.name, curve) for curve in chart.curves)}
    data = {
        "figures": [Figure(chart.draw(), chart.title, _scale(chart)) for chart in charts],
        "legend": [(marker_picture(curve), name) for name, curve in names.items()],
        "rows": [_row(trial) for trial in found.trials],
        "differences": [_difference(pair) for pair in found.differences],
        "notes": any(not trial.reached or trial.note for trial in found.trials),
        "measured": comparison_settings(found),
    }
    return Section("comparison", "Comparison", data)


def comparison_settings(found: ComparisonRecord) -> list[tuple[str, str]]:
    """Returns the settings of the trials that the file records."""
    about, accuracy = found.about, found.accuracy
    diagnosed = about.get("diagnosis")
    images = diagnosed.get("data") if isinstance(diagnosed, Mapping) else None
    pairs = [
        ("top-1 of the original", f"{quantity(accuracy.value, '%', accuracy.low, accuracy.high)} {_within(accuracy)}"),
        ("measured on", f"{plain(about.get('images'))} images, {plain(about.get('data'))}"),
        ("diagnosed on", _images(images) if isinstance(images, Mapping) else ""),
        ("seed", plain(about["seed"]) if "seed" in about else ""),
    ]
    methods = about.get("methods")
    for method in methods if isinstance(methods, list) else ():
        knobs = {name: value for name, value in method.items() if name != "name" and value not in (None, "", 0)}
        pairs.append((str(method.get("name")), plain(knobs, 16)))
    return [(name, words.strip()) for name, words in pairs if words.strip()]


def _images(data: Mapping[str, Any]) -> str:
    return f"{plain(data.get('images'))} images, {plain(data.get('fingerprint') or data.get('name'))}"


def _chart(found: ComparisonRecord, field: str, title: str, label: str, unit: str, logarithmic: bool) -> Chart:
    curves = []
    for index, name in enumerate(found.methods):
        drawn = [
            point
            for trial in found.trials
            if trial.method == name
            for point in [_point(trial, getattr(trial, field), unit)]
            if point is not None
        ]
        if drawn:
            # After six methods the colours repeat, with other markers.
            marker = (index + index // STYLES) % STYLES
            drawn.sort(key=lambda point: point.x)
            curves.append(Curve(name, tuple(drawn), f"style-{index % STYLES}", marker))
    values = [point.y for curve in curves for point in curve.points]
    suits = logarithmic and bool(values) and min(values) > NOUGHT and max(values) > LEAST_SPREAD * min(values)
    level = 0.0 if field == "change" else None
    return Chart(title, "% of the original's MACs", label, tuple(curves), suits, level, band=True)


def _point(trial: ComparedTrial, value: Measured, unit: str) -> CurvePoint | None:
    height, share = known(value.value), known(trial.macs_share)
    if height is None or share is None:
        return None
    low, high = known(value.low), known(value.high)
    words = f"{quantity(height, unit, low, high)} {interval(low, high)}".strip()
    return CurvePoint(100 * share, height, low, high, f"{_name(trial)}: {percent(share)} of the MACs, {words}")


def _name(trial: ComparedTrial) -> str:
    return trial.method if trial.share is None else f"{trial.method} at {_kept(trial)}"


def _kept(trial: ComparedTrial) -> str:
    return MISSING if trial.share is None else with_unit(short(100 * trial.share), "%")


def _scale(chart: Chart) -> str:
    return "logarithmic" if chart.logarithmic else ""


def _row(trial: ComparedTrial) -> dict[str, Any]:
    missed = "" if trial.reached else "target not reached"
    return {
        "method": trial.method,
        "kept": _kept(trial),
        "macs": percent(trial.macs_share),
        "params": percent(trial.params_share),
        "accuracy": _cell(trial.accuracy, "%"),
        "change": _cell(trial.change, "", signed=True),
        "agreement": _cell(trial.agreement, "%"),
        "divergence": _cell(trial.divergence, ""),
        "note": ": ".join(part for part in (missed, trial.note) if part),
    }


def _difference(pair: ComparedPair) -> dict[str, Any]:
    kept = "fixed rules" if pair.share is None else f"{percent(pair.share)} kept"
    return {
        "pair": f"{pair.second} minus {pair.first}",
        "budget": kept if pair.target is None else f"{percent(pair.target)} of the MACs",
        "divergence": _cell(pair.divergence, "", signed=True),
        "divergence_p": MISSING if pair.divergence_p is None else f"{pair.divergence_p:.3g}",
        "accuracy": _cell(pair.accuracy, "", signed=True),
        "accuracy_p": MISSING if pair.accuracy_p is None else f"{pair.accuracy_p:.3g}",
    }


def _cell(value: Measured, unit: str, signed: bool = False) -> tuple[str, str]:
    return quantity(value.value, unit, value.low, value.high, signed=signed), _within(value)


def _within(value: Measured) -> str:
    return interval(value.low, value.high)
