"""Robustness: the change of accuracy of the candidate on corrupted images, by corruption and severity."""

from attnrx.evidence import Finding
from attnrx.reports.content import ReportContent
from attnrx.reports.figures import Chart, Curve, CurvePoint, marker_picture
from attnrx.reports.numbers import interval, known, number
from attnrx.reports.sections.section import Figure, Section, grouped, has_severity


def robustness(content: ReportContent) -> Section | None:
    """Returns one chart with a curve for every corruption."""
    found = [finding for finding in (content.evidence.findings if content.evidence else ()) if has_severity(finding)]
    if not found:
        return None
    names = dict.fromkeys(finding.details["corruption"] for finding in found)
    curves = tuple(_curve(name, index, found) for index, name in enumerate(names))
    curves = tuple(curve for curve in curves if curve.points)
    chart = Chart("Change of accuracy on corrupted images", "severity", "accuracy change in points", curves, level=0.0)
    legend = tuple((marker_picture(curve), curve.name) for curve in curves)
    figure = Figure(chart.draw(), chart.title, legend=legend)
    return Section("robustness", "Robustness", {"figure": figure, "groups": grouped(found)})


def _curve(name: str, index: int, found: list[Finding]) -> Curve:
    drawn = [finding for finding in found if finding.details["corruption"] == name and known(finding.value) is not None]
    points = sorted((_point(finding) for finding in drawn), key=lambda point: point.x)
    return Curve(name, tuple(points), f"style-{index % 6}", index)


def _point(finding: Finding) -> CurvePoint:
    tip = f"{finding.claim}: {number(finding.value)} {interval(finding.low, finding.high)}".rstrip()
    return CurvePoint(float(finding.details["severity"]), finding.value, known(finding.low), known(finding.high), tip)
