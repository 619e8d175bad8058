"""The front of the plan: plans between the original and this model over speed or cost."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from attnrx.nouns.plan import Plan, PlanPoint
from attnrx.show.reports.content import ReportContent, Section
from attnrx.show.reports.figures import Chart, Curve, CurvePoint, Figure
from attnrx.show.reports.headline import cost_totals, finding_of, speeds
from attnrx.show.reports.numbers import MISSING, Number, fixed, interval, known, number, quantity, with_unit
from attnrx.vit.costs import speed_text
from attnrx.vit.outputs import KINDS

# No cost saved, no divergence, the same predictions, and all of the MACs, parameters and speed.
ORIGINAL = PlanPoint(1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0)
AXES = {"latency": "speed, times the original's", "macs": "% fewer MACs", "params": "% fewer parameters"}


@dataclass(frozen=True)
class Reading:
    """A quantity of a plan: the field of a point, its label and unit, decimals, and whether it has a sign."""

    field: str
    label: str
    unit: str
    decimals: int
    signed: bool = False
    scale: float = 1.0

    def value(self, point: PlanPoint) -> Number | None:
        """Returns the quantity in its unit; None where it was not measured."""
        value = getattr(point, self.field)
        return None if value is None else self.scale * value

    def text(self, point: PlanPoint) -> str:
        """Returns the quantity with its unit."""
        value = self.value(point)
        return MISSING if value is None else with_unit(fixed(value, self.decimals, self.signed), self.unit)


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
    """Returns the charts of accuracy and divergence, and the table of the plans."""
    plan = content.plan
    if plan is None or not plan.front:
        return None
    points = sorted((ORIGINAL, *plan.front), key=lambda point: _x(plan, point))
    chosen, of_latency = points.index(plan.front[-1]), plan.minimized == "latency"
    divergence = DIVERGENCES[plan.outputs.name]
    if (own := plan.about.get("divergence")) is not None:
        divergence = replace(divergence, label=f"{own[0].upper()}{own[1:]} from the original", unit="")
    measured = (CHANGE, AGREEMENTS[plan.outputs.name], divergence, *COSTS)
    readings = [SPEED] * of_latency + [
        reading for reading in measured if any(reading.value(point) is not None for point in plan.front)
    ]
    charts = [_chart(content, plan, points, reading) for reading in (CHANGE, divergence) if reading in readings]
    # Charts share their curves, so the page has one legend for all of them.
    legend = {name: picture for chart in charts for picture, name in chart.legend}
    names = [_name(plan, point) + ", this model" * (index == chosen) for index, point in enumerate(points)]
    # Accuracy and divergence of all plans are measured, the speed of some is known by the cost table only.
    predicted = [of_latency and point.faster is None for point in points]
    rows = []
    for name, point, is_predicted in zip(names, points, predicted, strict=True):
        cells = [reading.text(point) for reading in readings]
        rows.append((name, [f"({cells[0]})", *cells[1:]] if is_predicted else cells, point.description))
    data = {
        "figures": [Figure(chart.draw(), chart.title) for chart in charts],
        "legend": [(picture, name) for name, picture in legend.items()],
        "readings": readings,
        "rows": rows,
        "images": plan.about.get("images"),
        "predicted": any(predicted),
    }
    return Section("front", "Accuracy against " + ("speed" if of_latency else "cost"), data)


def _x(plan: Plan, point: PlanPoint) -> float:
    """Returns the value of a plan on the horizontal axis: its speed, or the saved share of the cost in %."""
    return point.speedup if plan.minimized == "latency" else 100 * (1 - point.cost)


def _name(plan: Plan, point: PlanPoint) -> str:
    # By identity, because a plan may have the same numbers.
    if point is ORIGINAL:
        return "original"
    value = _x(plan, point)
    return with_unit(fixed(value, 2), "x") if plan.minimized == "latency" else f"{number(value)} % fewer"


def _chart(content: ReportContent, plan: Plan, points: list[PlanPoint], reading: Reading) -> Chart:
    """Draws one quantity of all plans, and the verified and the unchanged model beside them."""
    title, label = "Change of accuracy", f"change of {plan.outputs.accuracy} in points"
    if reading is not CHANGE:
        title = "Divergence from the original"
        label = f"{reading.label} in {reading.unit}" if reading.unit else reading.label
    drawn = tuple(
        CurvePoint(_x(plan, point), value, tip=f"{_name(plan, point)}: {reading.text(point)}")
        for point in points
        if (value := reading.value(point)) is not None
    )
    curves = [Curve("plans, on the images of the plan", drawn, 0), *_verified(content, plan, reading)]
    speed = next(iter(speeds(content.measured)), None)
    if plan.minimized == "latency" and speed is not None and speed.by_runtime is not None:
        # The unchanged model at the speed that its runtime gives, beside which the others have to be read.
        name = f"unchanged model in {speed.runtime}"
        unchanged = CurvePoint(speed.by_runtime, 0.0, tip=f"{name}: {speed_text(speed.by_runtime)}")
        curves.append(Curve(name, (unchanged,), 2))
    return Chart(title, AXES.get(plan.minimized, plan.minimized), label, tuple(curves), level=0.0)


def _verified(content: ReportContent, plan: Plan, reading: Reading) -> Iterator[Curve]:
    """Yields the point of this model on the images of the evidence."""
    finding = finding_of(content.measured, "accuracy change" if reading is CHANGE else "divergence")
    if plan.minimized == "latency":
        x = next((speed.value for speed in speeds(content.measured)), None)
    else:
        totals = cost_totals(content.measured, plan.minimized) if plan.minimized in ("macs", "params") else None
        x = None if totals is None or not totals[0] else 100 * (1 - totals[1] / totals[0])
    if finding is None or known(finding.value) is None or x is None:
        return
    low, high = known(finding.low), known(finding.high)
    words = f"{quantity(finding.value, reading.unit, low, high, signed=reading.signed)} {interval(low, high)}"
    point = CurvePoint(x, finding.value, low, high, f"this model, verified: {words}")
    yield Curve("this model, on the test images", (point,), 1)
