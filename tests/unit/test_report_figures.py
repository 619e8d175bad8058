"""Pictures show the values they were given, and nothing that is written into them can break out."""

import math
from dataclasses import replace
from xml.etree import ElementTree

import pytest
import torch

from attnrx.nouns.diagnosis import LayerDiagnosis
from attnrx.show.reports import ReportContent
from attnrx.show.reports.drawing import AxisScale
from attnrx.show.reports.figures import LEVELS, Chart, Curve, CurvePoint, HeatMap
from attnrx.show.reports.sections.layers import maps
from support import report_content


def shapes(svg: str, name: str) -> list[ElementTree.Element]:
    return [element for element in ElementTree.fromstring(svg).iter() if name in element.get("class", "").split()]


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-0.7, 0.3), (1e-7, 3e-7), (4.0, 90_000.0), (0.9999, 1.0001)])
def test_ticks_are_inside_and_told_apart(low, high):
    labels = AxisScale(low, high, 0, 100).labels()
    assert 2 <= len(labels) <= 7
    assert all(low - 1e-9 * abs(high) <= tick <= high * (1 + 1e-9) for tick, _ in labels)
    if high > 1e-5:
        assert len({words for _, words in labels}) == len(labels)


def test_a_heat_map_colours_by_value_and_marks_what_is_gone():
    picture = HeatMap("rank", [[0.0, 4.0, 8.0], [None, math.nan, 99.0]], 0, 8).draw()
    cells = shapes(picture, "cell")
    assert [cell.get("class") for cell in cells] == [
        "cell level-0",
        "cell level-4",
        f"cell level-{LEVELS - 1}",
        "cell absent",
        "cell absent",
        f"cell level-{LEVELS - 1}",
    ]
    assert cells[3].findtext("title") == "layer 1, head 0: removed"


def test_charts_stay_in_their_frame():
    points = tuple(CurvePoint(x, 10.0**-x, 0.5 * 10.0**-x, 2 * 10.0**-x, f"point {x}") for x in range(1, 5))
    picture = Chart("t", "x", "y", (Curve("a", points, 0),)).draw()
    markers = shapes(picture, "marker")
    assert [marker.findtext("title") for marker in markers] == ["point 1", "point 2", "point 3", "point 4"]
    for marker in markers:
        x, y = map(float, marker.get("transform", "")[10:-1].split())
        assert 46 <= x <= 350
        assert 26 <= y <= 190


@pytest.mark.parametrize("exponent", range(-9, 10, 3))
def test_labels_of_an_axis_fit_beside_it(exponent: int) -> None:
    """Long labels were cut at the edge of the picture, "0.000002" to ".000002"."""
    for low, high in ((0.2, 1.7), (1.0, 1.3), (0.2, 4000.0), (-1.7, 0.4), (-3.0, 0.0)):
        axis = AxisScale(low * 10.0**exponent, high * 10.0**exponent, 190, 26)
        labels = axis.labels()
        assert labels
        for _, words in labels:
            # At 11 pixels a digit is about 6 wide; superscripts, points, signs and gaps are narrower.
            width = sum(3.5 if sign in "⁰¹²³⁴⁵⁶⁷⁸⁹⁻.,\N{NO-BREAK SPACE}" else 6.2 for sign in words)
            assert width <= 48, (words, width)
        assert len({words for _, words in labels}) == len(labels)


@pytest.mark.parametrize("flat", [True, False])
def test_the_open_readings_differ_between_heads(flat: bool) -> None:
    """The effective rank of a plain dense head is the number of its directions, the same in every head."""
    torch.manual_seed(0)
    diagnosis = report_content.example().diagnosis
    assert diagnosis is not None
    spectrum = diagnosis.layers[0].spectrum
    heads = len(spectrum.heads)
    names = ("effective_rank_mix", "effective_rank_weights", "selectivity")
    readings = {"effective_rank": torch.full((heads,), 64.0) if flat else torch.rand(heads)}
    readings |= {name: torch.rand(heads) for name in names}
    content = ReportContent("readings", diagnosis=replace(diagnosis, layers=(LayerDiagnosis(spectrum, readings),) * 2))
    section = maps(content)
    assert section is not None
    titles = [figure.title for figure in section.data["main"]]
    first = "Effective rank, mix" if flat else "Effective rank"
    assert titles[0] == first and ("Effective rank" in titles) != flat
