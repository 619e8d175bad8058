"""The front of a plan in a report: read from its file, a table over speed or cost."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from attnrx.nouns.plan import Plan, PlanPoint, PredictedQuantity
from attnrx.show.reports import ReportContent, render
from attnrx.show.reports.sections.front import front
from attnrx.support.errors import CheckpointError
from support import report_content

TIMES = "\N{MULTIPLICATION SIGN}"


POINTS = (
    PlanPoint(0.8, 0.01, 0.02, 0.95, -0.01, 0.79),
    PlanPoint(0.6, 0.03, 0.07, 0.9, faster=1.6),
)


def plan(spend: str = "latency", points: tuple[PlanPoint, ...] = POINTS, outputs: str = "logits") -> Plan:
    prescription = report_content.example().prescription
    assert prescription is not None
    return report_content.plan(prescription, spend, points, outputs)


def rows(content: ReportContent) -> dict[str, list[str]]:
    section = front(content)
    assert section is not None
    return {name: cells for name, cells, _ in section.data["rows"]}


def test_a_plan_is_read_as_it_was_saved(tmp_path: Path) -> None:
    timing = {"faster": 1.6, "batch": 32, "threads": 1, "precision": "float32", "clock": "wall", "hardware": "x"}
    expected = {"divergence": PredictedQuantity(0.07, 0.1, 64, (0.0, float("inf")))}
    saved = replace(plan(), measured=timing, expected=expected, explained=("a", "b"))
    path = saved.save(tmp_path)
    found = Plan.load(path)
    assert found.to_record() == saved.to_record() and found.expected == expected
    assert found.prescription.ranks == saved.prescription.ranks
    assert [point.speedup for point in found.front] == [1 / 0.8, 1.6]
    content = json.loads(path.read_text())
    for broken, complaint in (
        ({"front": [{"cost": 0.5}, 3]}, r"front\[0\].sensitivity is missing"),
        ({"front": []}, "front has 0 values"),
        ({"kind": "x"}, "not an attnrx plan"),
    ):
        path.write_text(json.dumps({**content, **broken}))
        with pytest.raises(CheckpointError, match=complaint):
            Plan.load(path)


def test_the_table_marks_the_chosen_plan_and_what_was_predicted() -> None:
    found = rows(replace(report_content.example(), plan=plan()))
    assert list(found) == ["original", f"1.25{TIMES}", f"1.60{TIMES}, this model"]
    texts = [[cell.replace("\N{NO-BREAK SPACE}", " ") for cell in cells] for cells in found.values()]
    assert texts == [
        [f"1.00{TIMES}", "0.0 points", "100.0 %", "0.000 nats", "100.0 %"],
        [f"(1.25{TIMES})", "\N{MINUS SIGN}1.0 points", "95.0 %", "0.020 nats", "79.0 %"],
        [f"1.60{TIMES}", "\N{EN DASH}", "90.0 %", "0.070 nats", "\N{EN DASH}"],
    ]


def test_plans_for_macs_are_shown_over_the_macs() -> None:
    points = (PlanPoint(0.75, 0.01, 0.01, 0.98, macs=0.75), PlanPoint(0.5, 0.05, 0.05, 0.9, macs=0.5))
    page = render(ReportContent("macs", plan=plan("macs", points)))
    assert "Accuracy against cost" in page and "predicted by the cost table" not in page
    assert [*rows(ReportContent("macs", plan=plan("macs", points)))][-1] == "50.0 % fewer, this model"


def test_the_table_names_the_divergence_of_what_the_model_returns() -> None:
    points = (PlanPoint(0.8, 0.1, 0.1, 0.9, -0.01),)
    pages = {kind: render(ReportContent("front", plan=plan("macs", points, kind))) for kind in ("logits", "embedding")}
    assert "KL from the original" in pages["logits"] and "Cosine distance" not in pages["logits"]
    assert "Cosine distance from the original" in pages["embedding"] and "Same nearest neighbour" in pages["embedding"]
    assert "KL from the original" not in pages["embedding"] and "nats" not in pages["embedding"]
    assert "Change of top-1 accuracy" in pages["logits"]
    assert "Change of 1-nearest-neighbour accuracy" in pages["embedding"]
