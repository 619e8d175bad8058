"""The sweep: every number over what the models cost, one curve for every contender, and all numbers as a table."""

from collections.abc import Sequence
from typing import Any

from attnrx.reports.content import ReportContent
from attnrx.reports.figures import Chart, Curve, Point, marker_picture
from attnrx.reports.numbers import MISSING, known, plain
from attnrx.reports.sections.comparison import LEAST_SPREAD, NOUGHT
from attnrx.reports.sections.section import Figure, Section
from attnrx.reports.sweep import Mean, SweepRecord, seeds_of
from attnrx.results import Label

STYLES = 6
MOST_CHARTS = 12
ROUNDING = 1e-9  # costs that differ by less are the same
# What costs are measured in: a number of the sweep, a factor, and words for the axis.
COSTS = (
    ("macs_share", 100.0, "% of the original's MACs"),
    ("time_ratio", 100.0, "% of the original's time"),
)
# What is drawn over them, where it was measured, and its words at the axis.
DRAWN = {
    "accuracy": "top-1 in %",
    "change": "change of top-1 in points",
    "agreement": "agreement in %",
    "divergence": "KL in nats",
    "speedup": "times faster",
}
OWN = ("contender", "share", "target")  # labels of a point; all others are those of its chart


def sweep(content: ReportContent) -> Section | None:
    """Gives a chart for every measure and cost, and the table of all numbers."""
    found = content.sweep
    if found is None:
        return None
    charts = [chart for cost in COSTS for metric in DRAWN for chart in _charts(found, metric, cost)][:MOST_CHARTS]
    curves = {curve.name: curve for chart in charts for curve in chart.curves}
    data = {
        "figures": [Figure(chart.draw(), chart.title) for chart in charts],
        "legend": [(marker_picture(curve), name) for name, curve in curves.items()],
        "axes": found.axes,
        "metrics": found.metrics,
        "rows": [
            (labels, seeds_of(means), [mean.shown if mean else (MISSING, "") for mean in means])
            for labels, means in found.lines()
        ],
        "runs": found.runs,
        "failures": found.failures,
        "about": [
            *((state, str(count)) for state, count in found.counts.items() if count),
            *((name, plain(value)) for name, value in found.about.items()),
        ],
    }
    return Section("sweep", "Sweep", data)


def _charts(found: SweepRecord, metric: str, cost: tuple[str, float, str]) -> list[Chart]:
    """Gives one chart for every combination of the labels that are no contender's."""
    name, factor, words = cost
    prices = [mean for mean in found.means if mean.metric == name]
    groups: dict[tuple[tuple[str, Label], ...], list[tuple[Mean, float]]] = {}
    for mean in found.means:
        place = _place(mean, prices) if mean.metric == metric else None
        if place is not None and known(mean.value) is not None:
            group = tuple((name, value) for name, value in mean.labels.items() if name not in OWN)
            groups.setdefault(group, []).append((mean, factor * place))
    contenders = list(dict.fromkeys(_contender(mean) for mean in found.means))
    return [
        Chart(
            _title(metric, group),
            words,
            DRAWN[metric],
            _curves(own, contenders),
            logarithmic=metric == "divergence" and _spread([mean.value or 0.0 for mean, _ in own]),
            level=0.0 if metric == "change" else None,
            band=True,
        )
        for group, own in groups.items()
    ]


def _spread(values: Sequence[float]) -> bool:
    return min(values) > NOUGHT and max(values) > LEAST_SPREAD * min(values)


def _place(mean: Mean, prices: Sequence[Mean]) -> float | None:
    """Finds what a point costs: the price that shares most labels with it and contradicts none, if there is but one."""
    fitting: dict[int, list[float]] = {}
    for price in prices:
        shared = price.labels.keys() & mean.labels.keys()
        agree = all(price.labels[name] == mean.labels[name] for name in shared)
        if "contender" in shared and agree and price.value is not None and known(price.value) is not None:
            fitting.setdefault(len(shared), []).append(price.value)
    best = fitting[max(fitting)] if fitting else []
    return best[0] if best and max(best) - min(best) <= ROUNDING else None


def _curves(own: Sequence[tuple[Mean, float]], contenders: list[str]) -> tuple[Curve, ...]:
    curves = []
    for index, name in enumerate(contenders):
        points = sorted(
            (_point(mean, place) for mean, place in own if _contender(mean) == name), key=lambda point: point.x
        )
        if points:
            marker = (index + index // STYLES) % STYLES
            curves.append(Curve(name, tuple(points), f"style-{index % STYLES}", marker))
    return tuple(curves)


def _point(mean: Mean, place: float) -> Point:
    share = mean.labels.get("share")
    kept = "" if share is None else f" at {plain(share)}"
    tip = f"{_contender(mean)}{kept}: {' '.join(mean.shown).strip()}, {mean.runs} seeds"
    return Point(place, mean.value or 0.0, known(mean.low), known(mean.high), tip)


def _contender(mean: Mean) -> str:
    return str(mean.labels.get("contender", ""))


def _title(metric: str, group: Sequence[tuple[str, Any]]) -> str:
    where = ", ".join(f"{name} {plain(value)}" for name, value in group)
    return f"{metric}: {where}" if where else metric
