"""The page of a comparison: methods over their MACs, as curves and a table."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from attnrx.show.reports.content import ReportContent, Section
from attnrx.show.reports.figures import Chart, Curve, CurvePoint, Figure
from attnrx.show.reports.numbers import interval, known, number, percent, plain, quantity, short, with_unit
from attnrx.show.reports.page import write_report
from attnrx_lab.comparison.record import MethodComparison, MethodTrial

MIN_RATIO = 5.0  # values that differ by less than this factor have a linear scale
ZERO = 1e-6  # nats: smaller divergences are rounding errors of zero


def write_page(path: Path | str, record: MethodComparison) -> Path:
    """Writes a comparison as one HTML file, and returns its path."""
    return write_report(path, page_content(record))


def page_content(record: MethodComparison, title: str = "attnrx compare") -> ReportContent:
    """Returns the content of the page of a comparison."""
    names, images = len(record.methods), record.about.get("images")
    methods = "method was" if names == 1 else "methods were"
    where = f" on {number(images)} images" if isinstance(images, int) else ""
    trials = len(record.trials) + len(record.unreached)
    tried = "one trial" if trials == 1 else f"{trials} trials"
    statement = f"{names} {methods} compared with the original in {tried}{where}; there are no claims with a limit."
    diagnosis = record.about.get("diagnosis")
    diagnosed = diagnosis.get("notes") if isinstance(diagnosis, Mapping) else None
    notes = [*(record.about.get("notes") or ()), *(diagnosed or ())]
    about = {**record.about, "notes": notes}
    return ReportContent(title, about, sections=(comparison(record),), statement=statement)


def comparison(record: MethodComparison) -> Section:
    """Returns one chart per measure over the MACs, one curve per method, and the table of all trials."""
    kind = record.outputs
    accuracy, divergence = kind.columns
    in_unit = f"{divergence} in {kind.unit}" if kind.unit else divergence
    charts = [
        _chart(record, "change", f"Change of {kind.accuracy}", "points", "points", level=0.0),
        _chart(record, "agreement", "Agreement with the original", "% of the images", "%"),
        _chart(record, "divergence", "Divergence from the original", in_unit, kind.unit),
    ]
    # A measure that no trial has, e.g. where all were not measured, has no chart.
    charts = [chart for chart in charts if chart.curves]
    legend = {name: picture for chart in charts for picture, name in chart.legend}
    data = {
        "accuracy": accuracy,
        "divergence": divergence,
        "divergence_and_unit": f"{divergence}, {kind.unit}" if kind.unit else divergence,
        "figures": [Figure(chart.draw(), chart.title) for chart in charts],
        "legend": [(picture, name) for name, picture in legend.items()],
        "record": record,
        "measured": _settings(record),
    }
    return Section("comparison", "Comparison", data, folder=Path(__file__).parent)


def _settings(record: MethodComparison) -> list[tuple[str, str]]:
    """Returns the settings of the trials that the file records."""
    # `about` is a free record, so a field may be missing or of any type.
    about, accuracy = record.about, record.accuracy
    share = quantity(accuracy.value, "%", accuracy.low, accuracy.high)
    pairs = [
        (f"{record.outputs.columns[0]} of the original", f"{share} {interval(accuracy.low, accuracy.high)}"),
        ("measured on", f"{plain(about.get('images'))} images, {plain(about.get('data'))}"),
    ]
    images = about.get("diagnosis", {}).get("data")
    if isinstance(images, Mapping):
        name = images.get("fingerprint") or images.get("name")
        pairs.append(("diagnosed on", f"{plain(images.get('images'))} images, {plain(name)}"))
    if "seed" in about:
        pairs.append(("seed", plain(about["seed"])))
    for method in about.get("methods", ()):
        knobs = {name: value for name, value in method.items() if name != "name" and value not in (None, "", 0)}
        pairs.append((method["name"], plain(knobs, 16)))
    return [(name, words.strip()) for name, words in pairs if words.strip()]


def _chart(
    record: MethodComparison, field: str, title: str, label: str, unit: str, level: float | None = None
) -> Chart:
    """Draws one measured value of the trials, named by its field, as one curve per method over the MACs."""
    curves = []
    for index, name in enumerate(record.methods):
        points = [_point(trial, field, unit) for trial in record.trials if trial.method == name]
        drawn = sorted((point for point in points if point is not None), key=lambda point: point.x)
        if drawn:
            curves.append(Curve(name, tuple(drawn), index))
    values = [point.y for curve in curves for point in curve.points]
    # Logarithms exist of positive values, and help only where they differ much.
    if field == "divergence" and values and min(values) > ZERO and max(values) > MIN_RATIO * min(values):
        curves = [replace(curve, points=tuple(map(_logarithmic, curve.points))) for curve in curves]
        label = f"log10 of the {label}"
    return Chart(title, "% of the original's MACs", label, tuple(curves), level)


def _logarithmic(point: CurvePoint) -> CurvePoint:
    low, high = (None if end is None else math.log10(max(end, point.y / 10)) for end in (point.low, point.high))
    return replace(point, y=math.log10(point.y), low=low, high=high)


def _point(trial: MethodTrial, field: str, unit: str) -> CurvePoint | None:
    measured, macs_share = getattr(trial, field), known(trial.macs_share)
    value, low, high = known(measured.value), known(measured.low), known(measured.high)
    if value is None or macs_share is None:
        return None
    words = f"{quantity(value, unit, low, high)} {interval(low, high)}".strip()
    share = "" if trial.share is None else f" at {with_unit(short(100 * trial.share), '%')}"
    tip = f"{trial.method}{share}: {percent(macs_share)} of the MACs, {words}"
    return CurvePoint(100 * macs_share, value, low, high, tip)
