"""The front of a plan in a report: read from its file, drawn over speed or cost, and as data of the slider."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import report_content
from attnrx.nouns.evidence import Evidence, Finding
from attnrx.show.reports import ComparisonRecord, FrontPoint, PlanFront, ReportContent
from attnrx.show.reports.content import ComparedTrial, Measured
from attnrx.show.reports.page import render
from attnrx.show.reports.sections.front import STEPS, front
from attnrx.support.errors import CheckpointError, InvalidInput

TIMES = "\N{MULTIPLICATION SIGN}"


def record(**changes: Any) -> dict[str, Any]:
    points = [
        {"cost": 0.8, "sensitivity": 0.01, "divergence": 0.02, "agreement": 0.95, "change": -0.01, "macs": 0.79},
        {"cost": 0.6, "sensitivity": 0.03, "divergence": 0.07, "agreement": 0.9, "faster": 1.6, "unknown": 1},
    ]
    plan = {"kind": "attnrx plan", "schema": 2, "spend": "latency", "front": points, "about": {"images": 192}}
    return {**plan, "measured": {"batch": 32}, **changes}


def explorer(content: ReportContent) -> dict[str, Any]:
    section = front(content)
    assert section is not None
    return section.data["explorer"]


def test_the_front_is_read_from_the_file_of_a_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(record()))
    found = PlanFront.load(path)
    assert (found.spend, found.images, found.conditions) == ("latency", 192, {"batch": 32})
    assert [point.speedup for point in found.points] == [1 / 0.8, 1.6]
    assert found.points[0].change == -0.01 and found.points[1].change is None
    for broken, complaint in (
        ({"front": [{"cost": 0.5}, 3]}, r"front\[1\] is 3"),
        ({"kind": "x"}, "not an attnrx plan"),
    ):
        path.write_text(json.dumps(record(**broken)))
        with pytest.raises(CheckpointError, match=complaint):
            PlanFront.load(path)
    with pytest.raises(InvalidInput, match="at least one"):
        PlanFront("macs", ())


def test_the_slider_starts_at_the_chosen_plan_and_marks_what_was_measured() -> None:
    data = explorer(replace(report_content.example(), front=PlanFront.of_record(record())))
    assert data["names"] == ["original", f"1.25{TIMES}", f"1.60{TIMES}, this model"]
    assert data["chosen"] == 2 and data["at"] == [0, round(STEPS * 0.25 / 0.6), STEPS]
    assert ["predicted" in source for source in data["sources"]] == [False, True, False]
    speed, change, agreement, divergence, macs = (reading["values"] for reading in data["readings"])
    assert speed == [1.0, 1.25, 1.6] and change == [0.0, -1.0, None] and agreement == [100.0, 95.0, 90.0]
    assert divergence == [0.0, 0.02, 0.07] and macs == [100.0, 79.0, None]
    # The chart of accuracy lacks a plan, so that its dot is not shown; in the other one x grows with the speed.
    assert [len(places) for places in data["places"]] == [2, 3]
    x = [place[0] for place in data["places"][1]]
    assert x == sorted(x) and len(set(x)) == 3


def test_plans_for_macs_are_shown_over_the_macs() -> None:
    points = (FrontPoint(0.75, 0.01, 0.98, macs=0.75), FrontPoint(0.5, 0.05, 0.9, macs=0.5))
    page = render(ReportContent("macs", front=PlanFront("macs", points)))
    assert "Accuracy against cost" in page and "% fewer MACs" in page and "predicted by the cost table" not in page
    data = explorer(ReportContent("macs", front=PlanFront("macs", points)))
    assert data["at"] == [0, STEPS // 2, STEPS] and data["names"][-1] == "50.0 % fewer, this model"


def test_the_verified_model_and_other_methods_are_drawn_beside_the_plans() -> None:
    details = {"quantity": "divergence"}
    kl = Finding("fidelity", "mean KL", 0.062, "nats", low=0.05, high=0.074, n=500, details=details)
    example = report_content.example()
    assert example.evidence is not None
    evidence = Evidence((*example.evidence.findings, kl), example.evidence.about)
    none = Measured()
    trial = ComparedTrial(
        "ToMe", 0.5, 1.0, 0.6, none, Measured(-2.0, -3.0, -1.0), none, Measured(0.1), speedup=Measured(1.4, 1.3, 1.5)
    )
    compared = ComparisonRecord((trial, replace(trial, method="untimed", speedup=none)), Measured(80.0), {})
    content = replace(example, evidence=evidence, front=PlanFront.of_record(record()), comparison=compared)
    section = front(content)
    assert section is not None
    assert [name for _, name in section.data["legend"]] == [
        "plans, on the images of the plan",
        "this model, on the test images",
        "unchanged model in attnrx's kernels",
        "ToMe",
    ]
    pictures = [figure.picture for figure in section.data["figures"]]
    assert f"ToMe at 50\N{NO-BREAK SPACE}%: 1.40{TIMES} faster" in pictures[0]
    assert "this model, verified: \N{MINUS SIGN}0.6\N{NO-BREAK SPACE}points" in pictures[0] and "0.062" in pictures[1]
    page = render(content)
    assert "Change of top-1 accuracy over speed" in page


def test_the_text_of_a_plan_cannot_end_the_data() -> None:
    point = FrontPoint(0.5, 0.01, description="</script><b>")
    page = render(ReportContent("hostile", front=PlanFront("macs", (point,))))
    assert page.count("</script>") == 2 and "<b>" not in page


def test_the_explorer_names_the_divergence_of_what_the_model_returns() -> None:
    points = (FrontPoint(0.8, 0.1, 0.9, -0.01),)
    pages = {
        kind: render(ReportContent("front", front=PlanFront("macs", points, outputs=kind)))
        for kind in ("logits", "embedding")
    }
    assert "KL from the original in nats" in pages["logits"] and "Cosine distance" not in pages["logits"]
    assert "Cosine distance from the original" in pages["embedding"] and "Same nearest neighbour" in pages["embedding"]
    assert "KL from the original" not in pages["embedding"] and "nats" not in pages["embedding"]
    assert "change of top-1 accuracy in points" in pages["logits"]
    assert "change of 1-nearest-neighbour accuracy in points" in pages["embedding"]
