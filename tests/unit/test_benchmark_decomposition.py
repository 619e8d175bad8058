"""The decomposition benchmark runs, at a size that takes a second, and both sides agree."""

import runpy
from pathlib import Path

import pytest

from attnrx.support.storage import read_json

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "decomposition.py"
TINY = ("--cases", "20x3x4:8", "--sweeps", "4", "--rounds", "2", "--clock", "cpu")


def run(*arguments: str) -> int:
    return runpy.run_path(str(SCRIPT))["main"]([*TINY, *arguments])


@pytest.mark.parametrize("start", ["random", "water_filling"])
def test_the_errors_of_ours_and_of_tensorly_agree(
    start: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensorly = pytest.importorskip("tensorly")
    out = tmp_path / "decomposition.json"
    try:
        assert run("--start", start, "--out", str(out)) == 0
    finally:
        tensorly.set_backend("numpy")
    (result,) = read_json(out)["results"]
    assert {baseline["backend"] for baseline in result["baselines"]} == {"numpy", "pytorch"}
    for baseline in result["baselines"]:
        assert abs(baseline["error"] - result["error"]) <= 1e-10
        assert baseline["ratio"]["value"] > 0
    assert read_json(out)["threads"]["torch"] == 1
    assert "baseline / ours" in capsys.readouterr().out


def test_a_disagreement_fails_the_run() -> None:
    tensorly = pytest.importorskip("tensorly")
    try:
        assert run("--backends", "numpy", "--agreement", "-1") == 1
    finally:
        tensorly.set_backend("numpy")
