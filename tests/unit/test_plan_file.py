"""A plan is read from its file as it was saved."""

import json
from pathlib import Path

import pytest

from attnrx.nouns.plan import Plan, PredictedQuantity
from attnrx.support.errors import CheckpointError
from support import report_content


def test_a_plan_is_read_as_it_was_saved(tmp_path: Path) -> None:
    prescription = report_content.example().prescription
    assert prescription is not None
    timing = {"faster": 1.6, "batch": 32, "threads": 1, "precision": "float32", "clock": "wall", "hardware": "x"}
    expected = {"divergence": PredictedQuantity(0.07, 0.1, 64, (0.0, float("inf")))}
    about = {"images": 192, "outputs": "logits"}
    saved = Plan(prescription, "latency=0.9x", "latency", 0.6, expected, ("a", "b"), timing, about)
    path = saved.save(tmp_path)
    found = Plan.load(path)
    assert found.to_record() == saved.to_record() and found.expected == expected
    assert found.prescription.ranks == saved.prescription.ranks
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "front": [{"cost": 0.8, "sensitivity": 0.1, "divergence": 0.2}]}))
    assert Plan.load(path).to_record() == saved.to_record()  # of a version whose plans had others beside them
    for broken, complaint in (
        ({"price": "x"}, "price is .*; it must be a finite number"),
        ({"kind": "x"}, "not an attnrx plan"),
    ):
        path.write_text(json.dumps({**content, **broken}))
        with pytest.raises(CheckpointError, match=complaint):
            Plan.load(path)
