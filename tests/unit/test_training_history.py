"""What a run writes and says about itself."""

import json
from pathlib import Path

import pytest

from attnrx.training import Console
from attnrx.training.reporters import Outline
from support.tiny_runs import run


def test_the_history_has_one_line_an_epoch(tmp_path: Path) -> None:
    made = run(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert lines == list(made.history)
    assert [line["epoch"] for line in lines] == [1, 2]
    assert [line["step"] for line in lines] == [3, 6]
    for line in lines:
        assert set(line["losses"]) == {"task", "target_rank", "perturbation_robustness"}


def test_plain_lines_say_every_epoch_and_where_a_run_resumes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run(tmp_path, Console(every=0.0))
    said = capsys.readouterr()
    assert said.out == ""
    assert "training 2 epochs of 3 steps" in said.err
    assert said.err.count("\nepoch ") == 2
    assert "step 1/6" in said.err
    Console().started(Outline(2, 3, 4))
    assert "resuming at step 4 of 6" in capsys.readouterr().err
