"""Comparisons: methods over their costs, and one prescription's trade-off over rho, as curves and tables."""

from collections.abc import Mapping
from typing import Any

from attnrx.show.reports.content import ComparedTrial, ComparisonRecord, Measured, ReportContent, TradeOffPoint
from attnrx.show.reports.figures import STYLES, Chart, Curve, CurvePoint
from attnrx.show.reports.numbers import interval, known, number, percent, plain, quantity, short, typeset, with_unit
from attnrx.show.reports.sections.section import Figure, Section
from attnrx.vit.costs import speed_text

Measure = tuple[str, str, str, str, bool]  # field, heading, axis label, unit, whether the scale may be logarithmic
LEAST_SPREAD = 5.0  # values that differ by less than this factor have a linear scale
NOUGHT = 1e-6  # nats: smaller divergences are rounding errors of zero


def measures_of(record: ComparisonRecord) -> tuple[Measure, ...]:
    """Returns the measures of the charts, in the words of what the model returns."""
    kind = record.kind
    axis = f"{kind.columns[1]} in {kind.unit}" if kind.unit else kind.columns[1]
    return (
        ("change", f"Change of {kind.accuracy}", "points", "points", False),
        ("agreement", "Agreement with the original", "% of the images", "%", False),
        ("divergence", "Divergence from the original", axis, kind.unit, True),
    )


def comparison(content: ReportContent) -> Section | None:
    """Returns one chart per measure over the MACs, one curve per method, and the table of all trials."""
    record = content.comparison
    if record is None:
        return None
    charts = [_speed_chart(record), *(_chart(record, *measure) for measure in measures_of(record))]
    # A quantity that no trial has, e.g. a speed that was not measured, has no chart.
    charts = [chart for chart in charts if chart.curves]
    legend = {name: picture for chart in charts for picture, name in chart.legend}
    figures = [Figure(chart.draw(), chart.title, "logarithmic" if chart.logarithmic else "") for chart in charts]
    accuracy, divergence = record.kind.columns
    data = {
        "accuracy": accuracy,
        "divergence": divergence,
        "divergence_and_unit": f"{divergence}, {record.kind.unit}" if record.kind.unit else divergence,
        "figures": figures,
        "legend": [(picture, name) for name, picture in legend.items()],
        "record": record,
        "notes": any(not trial.reached or trial.note for trial in record.trials),
        "measured": _settings(record),
    }
    return Section("comparison", "Comparison", data)


def _settings(found: ComparisonRecord) -> list[tuple[str, str]]:
    """Returns the settings of the trials that the file records."""
    # `about` is a free record, so a field may be missing or of any type.
    about, accuracy = found.about, found.accuracy
    share = quantity(accuracy.value, "%", accuracy.low, accuracy.high)
    pairs = [
        (f"{found.kind.columns[0]} of the original", f"{share} {interval(accuracy.low, accuracy.high)}"),
        ("measured on", f"{plain(about.get('images'))} images, {plain(about.get('data'))}"),
    ]
    diagnosed = about.get("diagnosis")
    images = diagnosed.get("data") if isinstance(diagnosed, Mapping) else None
    if isinstance(images, Mapping):
        name = images.get("fingerprint") or images.get("name")
        pairs.append(("diagnosed on", f"{plain(images.get('images'))} images, {plain(name)}"))
    if "seed" in about:
        pairs.append(("seed", plain(about["seed"])))
    methods = about.get("methods")
    for method in methods if isinstance(methods, list) else ():
        knobs = {name: value for name, value in method.items() if name != "name" and value not in (None, "", 0)}
        pairs.append((str(method.get("name")), plain(knobs, 16)))
    return [(name, words.strip()) for name, words in pairs if words.strip()]


def _chart(found: ComparisonRecord, field: str, title: str, label: str, unit: str, logarithmic: bool) -> Chart:
    return _chart_of(method_curves(found, field, unit), field, title, "% of the original's MACs", label, logarithmic)


def _speed_chart(found: ComparisonRecord) -> Chart:
    field, title, label, unit, _ = measures_of(found)[0]
    curves = method_curves(found, field, unit, by="speed")
    return _chart_of(curves, field, f"{title} over speed", "speed, times the original's", label, False)


def _chart_of(curves: list[Curve], field: str, title: str, across: str, label: str, logarithmic: bool) -> Chart:
    values = [point.y for curve in curves for point in curve.points]
    # A logarithmic axis needs positive values, and helps only where they differ much.
    suits = logarithmic and bool(values) and min(values) > NOUGHT and max(values) > LEAST_SPREAD * min(values)
    level = 0.0 if field == "change" else None
    return Chart(title, across, label, tuple(curves), suits, level, band=True)


def method_curves(found: ComparisonRecord, field: str, unit: str, by: str = "macs", first: int = 0) -> list[Curve]:
    """Returns one curve per method over its MACs or its speed; `first` is the style of the first one.

    `field` names a measured value of the trials, and `by` is "macs" or "speed".
    """
    curves = []
    for index, name in enumerate(found.methods, first):
        trial_points = (
            _point(trial, getattr(trial, field), unit, by) for trial in found.trials if trial.method == name
        )
        points = sorted((point for point in trial_points if point is not None), key=lambda point: point.x)
        if points:
            # After six methods the colours repeat, with other markers.
            curves.append(Curve(name, tuple(points), f"style-{index % STYLES}", index + index // STYLES))
    return curves


def _point(trial: ComparedTrial, value: Measured, unit: str, by: str) -> CurvePoint | None:
    height, across = known(value.value), known(trial.macs_share if by == "macs" else trial.speedup.value)
    if height is None or across is None:
        return None
    low, high = known(value.low), known(value.high)
    words = f"{quantity(height, unit, low, high)} {interval(low, high)}".strip()
    name = trial.method
    if trial.share is not None:
        name += f" at {with_unit(short(100 * trial.share), '%')}"
    cost = f"{percent(across)} of the MACs" if by == "macs" else typeset(speed_text(across))
    return CurvePoint(100 * across if by == "macs" else across, height, low, high, f"{name}: {cost}, {words}")


def trade_off(content: ReportContent) -> Section | None:
    """Returns removed directions against accuracy and discrepancy for every kind of realization, and a table."""
    points = content.trade_off
    if not points:
        return None
    across = "% of directions removed"
    changes, discrepancies = _trade_off_curves(points, "accuracy_change"), _trade_off_curves(points, "discrepancy")
    # At rho = 1 nothing is removed and the discrepancy may be 0, which has no logarithm.
    positive = all(point.discrepancy > 0 for point in points)
    charts = (
        Chart("Change of accuracy over removed directions", across, "accuracy change in points", changes, level=0.0),
        Chart(
            "Relative logit discrepancy over removed directions",
            across,
            "logit discrepancy (Eq. 46)",
            discrepancies,
            positive,
        ),
    )
    data: dict[str, Any] = {"figures": [Figure.of(chart) for chart in charts], "legend": charts[0].legend}
    return Section("trade-off", "Trade-off", {**data, "points": points})


def _trade_off_curves(points: tuple[TradeOffPoint, ...], field: str) -> tuple[Curve, ...]:
    """Returns a curve per kind of realization; `field` is "accuracy_change" or "discrepancy"."""
    by_kind: dict[str, list[CurvePoint]] = {point.kind: [] for point in points}
    for point in sorted(points, key=lambda point: point.removed_share):
        value = getattr(point, field)
        low, high = getattr(point, f"{field.removesuffix('_change')}_interval") or (None, None)
        words = f"{percent(point.removed_share)} removed, {number(value)} {interval(low, high)}".rstrip()
        tip = f"{point.kind}, rho {short(point.rho)}: {words}"
        by_kind[point.kind].append(CurvePoint(100 * point.removed_share, value, low, high, tip))
    return tuple(Curve.numbered(index, *own) for index, own in enumerate(by_kind.items()))
