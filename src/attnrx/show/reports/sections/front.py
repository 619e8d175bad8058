"""The front of the plan: plans between the original and this model over speed or cost, with a slider through them."""

from collections.abc import Iterator
from dataclasses import dataclass

from attnrx.show.reports.content import FrontPoint, PlanFront, ReportContent
from attnrx.show.reports.figures import Chart, Curve, CurvePoint
from attnrx.show.reports.headline import cost_totals, finding_of, speeds
from attnrx.show.reports.numbers import Number, fixed, interval, known, number, quantity, with_unit
from attnrx.show.reports.sections.comparison import method_curves
from attnrx.show.reports.sections.section import Figure, Section
from attnrx.vit.costs import speed_text
from attnrx.vit.outputs import KINDS

STEPS = 200  # positions of the slider
# No cost saved, no divergence, the same predictions, and all of the MACs, parameters and speed.
ORIGINAL = FrontPoint(1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0)
AXES = {"latency": "speed, times the original's", "macs": "% fewer MACs", "params": "% fewer parameters"}


@dataclass(frozen=True)
class Reading:
    """A quantity of the explorer: the field of a point, its label and unit, decimals, and whether it has a sign."""

    field: str
    label: str
    unit: str
    decimals: int
    signed: bool = False
    scale: float = 1.0

    def of(self, point: FrontPoint) -> Number | None:
        value = getattr(point, self.field)
        return None if value is None else self.scale * value

    def text(self, point: FrontPoint) -> str:
        value = self.of(point)
        return "\N{EN DASH}" if value is None else with_unit(fixed(value, self.decimals, self.signed), self.unit)


SPEED = Reading("speedup", "Speed", "x", 2)
CHANGE = Reading("change", "Change of accuracy", "points", 1, True, 100.0)
# By what the model returns.
DIVERGENCES = {
    name: Reading("divergence", f"{kind.columns[1][0].upper()}{kind.columns[1][1:]} from the original", kind.unit, 3)
    for name, kind in KINDS.items()
}
AGREEMENTS = {name: Reading("agreement", f"Same {kind.decision}", "%", 1, False, 100.0) for name, kind in KINDS.items()}
COSTS = (
    Reading("macs", "MACs", "%", 1, False, 100.0),
    Reading("params", "Parameters", "%", 1, False, 100.0),
)


def front(content: ReportContent) -> Section | None:
    """Returns the charts of accuracy and divergence, the table of the plans, and the data of the slider."""
    plan_front = content.front
    if plan_front is None:
        return None
    points = sorted((ORIGINAL, *plan_front.points), key=lambda point: _place(plan_front, point))
    chosen = points.index(plan_front.points[-1])
    of_latency = plan_front.spend == "latency"
    measured = (CHANGE, AGREEMENTS[plan_front.outputs], DIVERGENCES[plan_front.outputs], *COSTS)
    readings = [SPEED] * of_latency + [
        reading for reading in measured if any(reading.of(point) is not None for point in plan_front.points)
    ]
    charts = [
        _chart(content, plan_front, points, reading)
        for reading in (CHANGE, DIVERGENCES[plan_front.outputs])
        if reading in readings
    ]
    # Charts share their curves, so the page has one legend for all of them.
    legend = {name: picture for chart in charts for picture, name in chart.legend}
    names = [_name(plan_front, point, index == chosen) for index, point in enumerate(points)]
    data = {
        "figures": [Figure.of(chart) for chart in charts],
        "legend": [(picture, name) for name, picture in legend.items()],
        "readings": readings,
        "rows": [
            (name, [_cell(reading, plan_front, point) for reading in readings], point.description)
            for name, point in zip(names, points, strict=True)
        ],
        "images": plan_front.images,
        "predicted": any(_is_predicted(plan_front, point) for point in points),
        "chosen": chosen,
        "steps": STEPS,
        "explorer": {
            "names": names,
            "chosen": chosen,
            "sources": [_source(plan_front, point) for point in points],
            "at": [_position(plan_front, points, point) for point in points],
            "readings": [
                {
                    # Four decimals, because the page shows at most three.
                    "values": [None if (value := reading.of(point)) is None else round(value, 4) for point in points],
                    "unit": reading.unit,
                    "decimals": reading.decimals,
                    "signed": reading.signed,
                }
                for reading in readings
            ],
            "places": [_places(chart) for chart in charts],
        },
    }
    return Section("front", "Accuracy against " + ("speed" if of_latency else "cost"), data)


def _place(found: PlanFront, point: FrontPoint) -> float:
    """Returns the value of a plan on the horizontal axis."""
    return point.speedup if found.spend == "latency" else 100 * (1 - point.cost)


def _position(found: PlanFront, points: list[FrontPoint], point: FrontPoint) -> int:
    first, last = _place(found, points[0]), _place(found, points[-1])
    # The slider has whole positions, proportional to speed or cost, so plans are as far from each other as on the axis.
    return round(STEPS * (_place(found, point) - first) / (last - first)) if last > first else 0


def _places(chart: Chart) -> list[tuple[float, float]]:
    """Returns the position of every plan in the chart, in the units of the picture."""
    return [(round(x, 1), round(y, 1)) for x, y in (chart.place(point) for point in chart.curves[0].points)]


def _name(found: PlanFront, point: FrontPoint, is_chosen: bool) -> str:
    # By identity, because a plan may have the same numbers.
    if point is ORIGINAL:
        return "original"
    value = _place(found, point)
    text = with_unit(fixed(value, 2), "x") if found.spend == "latency" else f"{number(value)} % fewer"
    return f"{text}, this model" if is_chosen else text


def _is_predicted(found: PlanFront, point: FrontPoint) -> bool:
    """Whether the speed of a plan is known by the cost table only; its accuracy and divergence are always measured."""
    return found.spend == "latency" and point.faster is None


def _source(found: PlanFront, point: FrontPoint) -> str:
    return "measured plan" + ", speed predicted by the cost table" * _is_predicted(found, point)


def _cell(reading: Reading, found: PlanFront, point: FrontPoint) -> str:
    text = reading.text(point)
    return f"({text})" if reading is SPEED and _is_predicted(found, point) else text


def _chart(content: ReportContent, found: PlanFront, points: list[FrontPoint], reading: Reading) -> Chart:
    shown = [(point, value) for point in points if (value := reading.of(point)) is not None]
    curve_points = tuple(
        CurvePoint(_place(found, point), value, tip=f"{_name(found, point, False)}: {reading.text(point)}")
        for point, value in shown
    )
    label = f"change of {KINDS[found.outputs].accuracy} in points"
    if reading is not CHANGE:
        label = f"{reading.label} in {reading.unit}" if reading.unit else reading.label
    title = "Change of accuracy" if reading is CHANGE else "Divergence from the original"
    curves = [
        Curve("plans, on the images of the plan", curve_points, "style-0", 0),
        *_verified(content, found, reading),
    ]
    if found.spend == "latency":
        curves += _unchanged(content)
    # A front of MACs has the saved share as its axis, and the curves of methods have the remaining one.
    if content.comparison is not None and found.spend == "latency":
        field = "change" if reading is CHANGE else "divergence"
        curves += method_curves(content.comparison, field, reading.unit, by="speed", first=3)
    return Chart(title, AXES.get(found.spend, found.spend), label, tuple(curves), level=0.0, band=True)


def _verified(content: ReportContent, found: PlanFront, reading: Reading) -> Iterator[Curve]:
    """Yields the point of this model on the images of the evidence."""
    finding = finding_of(content, "accuracy change" if reading is CHANGE else "divergence")
    place = _verified_place(content, found)
    if finding is None or known(finding.value) is None or place is None:
        return
    low, high = known(finding.low), known(finding.high)
    words = f"{quantity(finding.value, reading.unit, low, high, signed=reading.signed)} {interval(low, high)}"
    point = CurvePoint(place, finding.value, low, high, f"this model, verified: {words}")
    yield Curve("this model, on the test images", (point,), "style-1", 3)


def _unchanged(content: ReportContent) -> Iterator[Curve]:
    """Yields the unchanged model at the speed that its runtime gives, beside which the others have to be read."""
    speed = next(iter(speeds(content)), None)
    if speed is None or speed.by_runtime is None:
        return
    words = f"unchanged model in {speed.runtime}"
    yield Curve(
        words, (CurvePoint(speed.by_runtime, 0.0, tip=f"{words}: {speed_text(speed.by_runtime)}"),), "style-2", 2
    )


def _verified_place(content: ReportContent, found: PlanFront) -> float | None:
    if found.spend == "latency":
        return next((speed.value for speed in speeds(content)), None)
    totals = cost_totals(content, found.spend) if found.spend in ("macs", "params") else None
    return None if totals is None or not totals[0] else 100 * (1 - totals[1] / totals[0])
