"""The benchmarks run, at a size that takes a second, and write what they promise."""

import runpy
from pathlib import Path

import pytest
import torch

from attnrx.storage import read_json

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def run(name: str, *arguments: str) -> int:
    # The benchmarks measure what a user has: float32 by default.
    torch.set_default_dtype(torch.float32)
    return runpy.run_path(str(BENCHMARKS / name))["main"]([*arguments, "--scenario", "digits", "--rounds", "2"])


def test_latency_compares_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "latency.json"
    asked = ("--ranks", "16", "8", "--patterns", "ragged", "--batches", "2", "--precisions", "float32")
    assert run("latency.py", *asked, "--device", "cpu", "--out", str(out)) == 0
    full, half = read_json(out)["results"]
    assert full["macs_ratio"] == 1 > half["macs_ratio"]
    assert full["memory"]["candidate"] == full["memory"]["reference"]
    assert half["latency"]["ratio"]["value"] > 0
    assert "8 ragged" in capsys.readouterr().out


def test_training_step_compares_forms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "step.json"
    asked = ("--batch", "2", "--precisions", "float32", "--modes", "eager", "--device", "cpu")
    assert run("training_step.py", *asked, "--out", str(out)) == 0
    (result,) = read_json(out)["results"]
    assert result["svda"]["median"] > 0 and result["dense"]["median"] > 0
    assert "svda / dense" in capsys.readouterr().out
