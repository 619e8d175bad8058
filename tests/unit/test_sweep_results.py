"""From the records of commands to rows, from rows to means over seeds, and from a store to tables and a page."""

import csv
import json
from pathlib import Path

import pytest

from attnrx.cli import main
from attnrx.show.checks.statistics import t_interval
from attnrx.support.errors import CheckpointError
from attnrx_lab.sweeps import Job, Result, SweepStore, of_job, over_seeds, rows_of

ESTIMATE = {"value": 80.0, "low": 70.0, "high": 90.0}
COMPARISON = {
    "kind": "attnrx comparison",
    "accuracy": ESTIMATE,
    "about": {"images": 50},
    "trials": [
        {
            "method": "mix",
            "share": 0.5,
            "target": None,
            **dict.fromkeys(("accuracy", "change", "agreement", "divergence"), ESTIMATE),
            "macs_share": 0.6,
            "params_share": 0.7,
            "n": 50,
            "seconds": 2.0,
        }
    ],
}
SPEEDS = {
    "kind": "attnrx speeds",
    "speeds": [
        {
            "method": "mix",
            "share": 0.5,
            "macs_share": 0.6,
            "speedup": [1.5, 1.4, 1.6],
            "latency": {"batch": 8, "threads": 1, "rounds": 20, "faster": {"value": 1.5, "low": 1.4, "high": 1.6}},
        }
    ],
}
FINDING = {"check": "fidelity", "claim": "agreement", "value": 99.0, "low": 98.0, "high": 100.0, "unit": "%", "n": 9}
EVIDENCE = {"kind": "attnrx evidence", "outcome": "holds", "findings": [FINDING]}
TABLE = {
    "kind": "attnrx reproduced table",
    "cells": [{"row": "mask", "column": "top1", "value": 3.0, "low": None, "high": None, "seeds": [3.0]}],
}


def store(folder: Path, values: dict[int, float]) -> Path:
    """Two methods at two costs, with one seed for each of the values."""
    path = folder / "results"
    made = SweepStore(path)
    for seed, value in values.items():
        for method, worse in (("a|b", 0.0), ("<b>", 5.0)):
            job = Job((method, str(seed)), {"seed": seed, "data": "digits", "method": method})
            made.add([job])
            labels = ({"share": 0.5}, {"share": 0.25})
            rows = [Result("macs_share", own["share"], labels=own) for own in labels]
            rows += [Result("change", value - worse / own["share"], -9.0, 9.0, 50, "points", own) for own in labels]
            made.finish(job, rows, None)
    return path


def test_every_record_has_its_rows() -> None:
    compared = {(row.metric, row.labels.get("method")): row for row in rows_of(COMPARISON)}
    assert compared["accuracy", "mix"].value == 80.0 and compared["accuracy", "mix"].unit == "%"
    assert compared["change", "mix"].labels == {"method": "mix", "share": 0.5}
    assert compared["macs_share", "mix"].value == 0.6
    timed = {row.metric: row for row in rows_of(SPEEDS)}
    assert timed["speedup"] == Result(
        "speedup", 1.5, 1.4, 1.6, 20, "x", {"method": "mix", "share": 0.5, "batch": 8, "threads": 1}
    )
    found = rows_of(EVIDENCE)
    assert found[0] == Result("agreement", 99.0, 98.0, 100.0, 9, "%", {"check": "fidelity"})
    assert rows_of(TABLE) == (Result("top1", 3.0, labels={"row": "mask"}),)
    assert rows_of({"model": "runs/x", "accuracy": {"test": 0.5}, "steps": 3, "done": True}) == (
        Result("accuracy.test", 0.5),
        Result("steps", 3.0),
        Result("done", 1.0),
    )


def test_axes_with_the_name_of_a_label_of_the_record_stay_apart() -> None:
    """Two ways of one check are two rows, not two seeds."""
    rows = [
        of_job(Result("drop", value + seed, labels={"check": "accuracy"}), {"check": way, "seed": seed})
        for way, value in (("strict", 1.0), ("lax", 5.0))
        for seed in (0, 1)
    ]
    assert [(mean.labels, mean.value, mean.runs) for mean in over_seeds(rows)] == [
        ({"check": "strict", "check in the record": "accuracy"}, 1.5, 2),
        ({"check": "lax", "check in the record": "accuracy"}, 5.5, 2),
    ]
    same = of_job(Result("drop", 1.0, labels={"check": "accuracy", "share": 0.5}), {"check": "accuracy"})
    assert same.labels == {"check": "accuracy", "share": 0.5}


def test_means_over_seeds_have_t_intervals() -> None:
    rows = [Result("change", value, labels={"seed": seed, "share": 0.5}) for seed, value in enumerate((1.0, 2.0, 6.0))]
    (mean,) = over_seeds(rows)
    expected = t_interval([1.0, 2.0, 6.0])
    assert (mean.value, mean.low, mean.high, mean.runs) == (expected.value, expected.low, expected.high, 3)
    assert mean.labels == {"share": 0.5}


def test_what_one_seed_measured_twice_is_no_second_seed() -> None:
    rows = [
        Result("accuracy", value, 1.0, 9.0, labels={"seed": seed}) for seed, value in ((0, 4.0), (0, 4.0), (1, 6.0))
    ]
    (mean,) = over_seeds(rows)
    assert (mean.value, mean.runs) == (5.0, 2)


def test_where_the_seed_changes_nothing_the_interval_is_that_of_the_measurement() -> None:
    rows = [Result("accuracy", 4.0, 1.0, 9.0, labels={"seed": seed}) for seed in range(3)]
    (mean,) = over_seeds(rows)
    assert (mean.value, mean.low, mean.high, mean.runs) == (4.0, 1.0, 9.0, 3)


@pytest.mark.slow
def test_a_store_as_table_and_csv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = str(store(tmp_path, {0: 1.0, 1: 2.0}))
    assert main(["sweep", "results", place, "--csv", str(tmp_path / "table.csv")]) == 0
    assert "a|b" in capsys.readouterr().out
    with (tmp_path / "table.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 16
    assert lines[2] | {"value": ""} == {
        "data": "digits",
        "method": "a|b",
        "seed": "0",
        "share": "0.5",
        "metric": "change",
        "value": "",
        "low": "-9.0",
        "high": "9.0",
        "n": "50",
        "unit": "points",
    }
    assert main(["sweep", "status", place, "--json"]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert reported["counts"] == {"waiting": 0, "running": 0, "done": 4, "failed": 0}


def test_what_is_no_store_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CheckpointError, match="has no jobs"):
        SweepStore(tmp_path / "none", create=False)
    (tmp_path / "text").write_text("no folder")
    with pytest.raises(CheckpointError, match="is not a folder"):
        SweepStore(tmp_path / "text")
    SweepStore(tmp_path / "new").add([Job(("costs",))])
    assert main(["sweep", "results", str(tmp_path / "new")]) == 2
    assert "holds no number yet" in capsys.readouterr().err
    assert main(["sweep", "run", "sweep.toml"]) == 2
    assert "--store" in capsys.readouterr().err


@pytest.mark.slow
def test_commands_are_jobs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The one that is wrong is recorded, the other gives its numbers."""
    file = tmp_path / "sweep.toml"
    file.write_text('command = "costs {model}"\n[grid]\nmodel = ["svda:digits", "svda:nothing"]\n')
    assert main(["sweep", "run", str(file), "--store", str(tmp_path / "r"), "--json"]) == 1
    jobs = json.loads(capsys.readouterr().out)["jobs"]
    assert [job["state"] for job in jobs] == ["done", "failed"]
    assert "svda:nothing" in jobs[1]["error"]
    metrics = {result.metric for result in SweepStore(tmp_path / "r").results()}
    assert any("macs" in metric for metric in metrics)
