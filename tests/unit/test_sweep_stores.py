"""Stores of sweeps that others wrote: their jobs are not run, and damage is an error that names it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from attnrx.support.errors import CheckpointError
from attnrx_lab.sweeps import Job, Result, SweepStore, grid_jobs, run_jobs
from support.command_line import call
from support.sweep_work import notes, work

FIRST, SECOND = Job(("first",), {"seed": 0}), Job(("second",), {"seed": 1})


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A finished job, and one that waits."""
    store = SweepStore(tmp_path / "results")
    store.add([FIRST, SECOND])
    store.finish(FIRST, [Result("value", 1.0)], None)
    return tmp_path / "results"


@pytest.mark.slow
def test_a_sweep_runs_the_jobs_of_its_own_file_only(tmp_path: Path) -> None:
    store = SweepStore(tmp_path / "results")
    (tmp_path / "theirs").mkdir()
    theirs = grid_jobs(f"quick {{seed}} {tmp_path / 'theirs'}", {"seed": [1]})
    own = grid_jobs(f"quick {{seed}} {tmp_path}", {"seed": [2]})
    store.add([*theirs, *own])
    assert run_jobs(store, own, work, 2, 1, lambda _: None) == {"waiting": 1, "running": 0, "done": 1, "failed": 0}
    assert notes(tmp_path, 2) == ["began", "ended"] and not list((tmp_path / "theirs").iterdir())


def test_trust_is_given_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "grid.toml"
    path.write_text('command = "costs {model} --trust"\n[grid]\nmodel = ["svda:digits"]\n')
    done = call("sweep", "run", path, "--store", tmp_path / "s")
    assert done.code == 2 and "add --trust" in done.err and not (tmp_path / "s").exists()


FIELDS: tuple[tuple[str, Any], ...] = (
    ("words", 3), ("words", []), ("words", [1]), ("words", {"a": 1}), ("words", None), ("words", ["other"]),
    ("labels", 3), ("labels", [1]), ("labels", {"a": []}), ("results", 3), ("results", [3]), ("results", [{}]),
    ("results", [{"metric": 1, "value": 1}]), ("results", [{"metric": "a", "value": "b"}]),
    ("results", [{"metric": "a", "value": 1, "colour": 2}]), ("results", [{"metric": "a", "value": 1, "labels": 3}]),
    ("error", 3), ("seconds", "a"), ("number", -1), ("colour", 1),
)  # fmt: skip


@pytest.mark.parametrize(("name", "value"), FIELDS, ids=str)
def test_an_edited_record_is_refused(store: Path, name: str, value: Any) -> None:
    path = store / FIRST.id / "job.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    with pytest.raises(CheckpointError, match=rf"job\.json: {name}"):
        SweepStore(store).states()
    for action in ("status", "results"):
        done = call("sweep", action, store)
        assert done.code == 2 and f"job.json: {name}" in done.err


@pytest.mark.parametrize("damage", ["truncated", "text", "pipe", "folder"])
def test_a_damaged_record_is_refused(store: Path, damage: str) -> None:
    path = store / FIRST.id / "job.json"
    content = path.read_bytes()
    path.unlink()
    if damage == "pipe":
        os.mkfifo(path)
    elif damage == "folder":
        path.mkdir()
    else:
        path.write_bytes(content[: len(content) // 2] if damage == "truncated" else b"no JSON")
    done = call("sweep", "status", store)
    assert done.code == 2 and str(path) in done.err and "Traceback" not in done.err
