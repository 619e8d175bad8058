"""The front of the plan: plans between the original and this model over speed or cost."""

from attnrx.nouns.plan import Plan, PlanPoint
from attnrx.show.reports.content import ReportContent, Section
from attnrx.show.reports.numbers import MISSING, Number, fixed, number, with_unit

# No cost saved, no divergence, the same predictions, and all of the MACs, parameters and speed.
ORIGINAL = PlanPoint(1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0)


def front(content: ReportContent) -> Section | None:
    """Returns the table of the plans."""
    plan = content.plan
    if plan is None or not plan.front:
        return None
    of_latency, kind = plan.minimized == "latency", plan.outputs
    # Speeds of plans of latency, or the saved shares of the cost in %.
    at = {point: point.speedup if of_latency else 100 * (1 - point.cost) for point in (ORIGINAL, *plan.front)}
    points = sorted(at, key=lambda point: at[point])
    own = plan.about.get("divergence")
    distance, unit = (kind.columns[1], kind.unit) if own is None else (own, "")
    columns = {
        f"Change of {kind.accuracy}": [_text(point.change, "points", 1, 100.0, signed=True) for point in points],
        f"Same {kind.decision}": [_text(point.agreement, "%", 1, 100.0) for point in points],
        f"{distance[0].upper()}{distance[1:]} from the original": [
            _text(point.divergence, unit, 3) for point in points
        ],
        "MACs": [_text(point.macs, "%", 1, 100.0) for point in points],
        "Parameters": [_text(point.params, "%", 1, 100.0) for point in points],
    }
    measured = [point is not ORIGINAL for point in points]
    columns = {
        name: texts
        for name, texts in columns.items()
        if any(text != MISSING and is_measured for text, is_measured in zip(texts, measured, strict=True))
    }
    # Accuracy and divergence of all plans are measured, the speed of some is known by the cost table only.
    predicted = [of_latency and point.faster is None for point in points]
    if of_latency:
        speeds = [_text(at[point], "x", 2) for point in points]
        columns = {
            "Speed": [
                f"({text})" if is_predicted else text for text, is_predicted in zip(speeds, predicted, strict=True)
            ]
        } | columns
    names = [_name(plan, point, at[point]) + ", this model" * (point == plan.front[-1]) for point in points]
    cells = zip(*columns.values(), strict=True)
    data = {
        "columns": list(columns),
        "rows": [(name, row, point.description) for name, row, point in zip(names, cells, points, strict=True)],
        "images": plan.about.get("images"),
        "predicted": any(predicted),
    }
    return Section("front", "Accuracy against " + ("speed" if of_latency else "cost"), data)


def _name(plan: Plan, point: PlanPoint, at: Number) -> str:
    if point is ORIGINAL:
        return "original"
    return with_unit(fixed(at, 2), "x") if plan.minimized == "latency" else f"{number(at)} % fewer"


def _text(value: Number | None, unit: str, decimals: int, scale: float = 1.0, signed: bool = False) -> str:
    return MISSING if value is None else with_unit(fixed(scale * value, decimals, signed), unit)
