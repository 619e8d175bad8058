"""Storages of sweeps that others wrote: their jobs are not run, and damage is an error that names it."""

import json
import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from attnrx.support.errors import CheckpointError
from attnrx_lab.sweeps import Job, Result, SweepStudy, grid_jobs, run_jobs
from support.command_line import call
from support.sweep_work import notes, work


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A finished job, and one that waits."""
    study = SweepStudy(tmp_path / "results.sqlite")
    study.add([Job(("first",), {"seed": 0}), Job(("second",), {"seed": 1})])
    taken = study.take({Job(("first",)).id})
    assert taken is not None and taken[1].words == ("first",)
    study.finish(taken[0], [Result("value", 1.0)], None)
    return tmp_path / "results.sqlite"


def test_only_jobs_of_these_ids_are_taken(store: Path) -> None:
    study = SweepStudy(store)
    assert study.take({"0" * 16}) is None
    assert study.counts({Job(("first",)).id}) == {"waiting": 0, "running": 0, "done": 1, "failed": 0}
    taken = study.take({Job(("second",)).id})
    assert taken is not None and taken[1].words == ("second",)


@pytest.mark.slow
def test_a_sweep_runs_the_jobs_of_its_own_file_only(tmp_path: Path) -> None:
    study = SweepStudy(tmp_path / "results.sqlite")
    (tmp_path / "theirs").mkdir()
    theirs = grid_jobs(f"quick {{seed}} {tmp_path / 'theirs'}", {"seed": [1]})
    own = grid_jobs(f"quick {{seed}} {tmp_path}", {"seed": [2]})
    study.add([*theirs, *own])
    assert run_jobs(study, work, 2, 1, lambda _: None, {job.id for job in own})["done"] == 1
    assert notes(tmp_path, 2) == ["began", "ended"] and not list((tmp_path / "theirs").iterdir())
    assert study.counts()["waiting"] == 1


def test_trust_is_given_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "grid.toml"
    path.write_text('command = "costs {model} --trust"\n[grid]\nmodel = ["svda:digits"]\n')
    done = call("sweep", "run", path, "--store", tmp_path / "s.sqlite")
    assert done.code == 2 and "add --trust" in done.err and not (tmp_path / "s.sqlite").exists()


ATTRIBUTES: tuple[tuple[str, Any], ...] = (
    ("words", 3), ("words", []), ("words", [1]), ("words", {"a": 1}), ("words", None), ("labels", 3), ("labels", [1]),
    ("labels", {"a": []}), ("results", 3), ("results", [3]), ("results", [{}]),
    ("results", [{"metric": 1, "value": 1}]),
    ("results", [{"metric": "a", "value": "b"}]), ("results", [{"metric": "a", "value": 1, "colour": 2}]),
    ("results", [{"metric": "a", "value": 1, "labels": 3}]), ("error", 3), ("owner", 3), ("owner", ["a"]),
    ("owner", ["a", "b"]),
)  # fmt: skip


@pytest.mark.parametrize(("name", "value"), ATTRIBUTES, ids=str)
def test_an_edited_trial_is_refused(store: Path, name: str, value: Any) -> None:
    with sqlite3.connect(store) as database:
        query = "INSERT OR REPLACE INTO trial_user_attributes (trial_id, key, value_json) VALUES (1, ?, ?)"
        database.execute("DELETE FROM trial_user_attributes WHERE trial_id = 1 AND key = ?", (name,))
        database.execute(query, (name, json.dumps(value)))
    database.close()
    with pytest.raises(CheckpointError, match=rf"results\.sqlite, trial 0: {name}"):
        SweepStudy(store).states()
    for action in ("status", "results"):
        done = call("sweep", action, store)
        assert done.code == 2 and f"trial 0: {name}" in done.err


@pytest.mark.parametrize("damage", ["truncated", "zeros", "text", "pipe", "folder", "no json"])
def test_a_damaged_store_is_refused(store: Path, damage: str) -> None:
    content = store.read_bytes()
    if damage == "no json":
        with sqlite3.connect(store) as database:
            database.execute("UPDATE trial_user_attributes SET value_json = '{' WHERE key = 'words'")
        database.close()
    else:
        store.unlink()
        if damage == "pipe":
            os.mkfifo(store)
        elif damage == "folder":
            store.mkdir()
        else:
            middle = len(content) // 2
            kinds = {"truncated": content[:middle], "zeros": content[:4096] + bytes(len(content) - 4096)}
            store.write_bytes(kinds.get(damage, b"no database"))
    done = call("sweep", "status", store)
    assert done.code == 2 and str(store) in done.err and "Traceback" not in done.err
