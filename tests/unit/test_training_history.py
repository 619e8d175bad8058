"""What a run writes and says about itself."""

import json
from pathlib import Path

from support.tiny_runs import run


def test_the_history_has_one_line_an_epoch(tmp_path: Path) -> None:
    made = run(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert lines == list(made.history)
    assert [line["epoch"] for line in lines] == [1, 2]
    assert [line["step"] for line in lines] == [3, 6]
    for line in lines:
        assert set(line["losses"]) == {"task", "target_rank", "perturbation_robustness"}


def test_the_log_has_every_epoch(tmp_path: Path) -> None:
    lines: list[str] = []
    run(tmp_path, log=lines.append)
    assert lines[0] == "training 2 epochs of 3 steps: 6 steps"
    assert sum(line.startswith("epoch ") for line in lines) == 2
