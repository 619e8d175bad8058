"""Robustness: what the candidate loses or gains beside its reference when the images are spoilt, by severity."""

from attnrx.evidence import Finding
from attnrx.reports.content import ReportContent
from attnrx.reports.figures import Chart, Curve, Point, marker_picture
from attnrx.reports.numbers import interval, number
from attnrx.reports.sections.section import Figure, Section

CHECK = "robustness"


def robustness(content: ReportContent) -> Section | None:
    """Gives one chart with a curve for every corruption."""
    found = [finding for finding in (content.evidence.of(CHECK) if content.evidence else ()) if _has_place(finding)]
    names = list(dict.fromkeys(finding.details["corruption"] for finding in found))
    if not names:
        return None
    curves = tuple(_curve(name, index, found) for index, name in enumerate(names))
    chart = Chart("Change of accuracy on spoilt images", "severity", "accuracy change in points", curves, level=0.0)
    legend = tuple((marker_picture(curve), curve.name) for curve in curves)
    return Section("robustness", "Robustness", {"figure": Figure(chart.draw(), chart.title, legend=legend)})


def _has_place(finding: Finding) -> bool:
    return finding.value is not None and {"corruption", "severity"} <= finding.details.keys()


def _curve(name: str, index: int, found: list[Finding]) -> Curve:
    own = [finding for finding in found if finding.details["corruption"] == name]
    points = sorted((_point(finding) for finding in own), key=lambda point: point.x)
    return Curve(name, tuple(points), f"style-{index % 6}", index)


def _point(finding: Finding) -> Point:
    tip = f"{finding.claim}: {number(finding.value)} {interval(finding.low, finding.high)}".rstrip()
    return Point(float(finding.details["severity"]), finding.value, finding.low, finding.high, tip)
