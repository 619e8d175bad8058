"""Stopped anywhere, in any way, and resumed == never stopped: the same weights and the same history, bit for bit."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from attnrx.support.errors import TrainingInterrupted
from attnrx.training import TrainingRun, checkpoints
from support.tiny_runs import at, run, same

SCRIPT = Path(__file__).parents[1] / "support" / "tiny_runs.py"


class Crash(BaseException):
    """Something that nobody expected."""


def crash() -> None:
    raise Crash


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    return run(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("step", [1, 2, 3, 4, 5, 6])
def test_a_crash_after_any_step_leaves_no_trace(step: int, whole: TrainingRun, tmp_path: Path) -> None:
    with pytest.raises(Crash):
        run(tmp_path, at(step, crash))
    assert same(run(tmp_path), whole)


def test_a_resumed_run_does_not_begin_again(tmp_path: Path) -> None:
    with pytest.raises(Crash):
        run(tmp_path, at(5, crash))
    lines: list[str] = []
    run(tmp_path, log=lines.append)
    assert lines[0].endswith("resuming at step 4 of 6")


OTHER_KNOBS: list[dict] = [{"ema": None}, {"precision": "bf16"}]


@pytest.mark.parametrize("knobs", OTHER_KNOBS)
def test_other_knobs_resume_too(knobs: dict, tmp_path: Path) -> None:
    with pytest.raises(Crash):
        run(tmp_path / "stopped", at(5, crash), **knobs)
    assert same(run(tmp_path / "stopped", **knobs), run(tmp_path / "whole", **knobs))


@pytest.mark.slow
def test_a_process_killed_in_the_middle_of_an_epoch(whole: TrainingRun, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"}
    killed = subprocess.run([sys.executable, str(SCRIPT), str(tmp_path), "5"], env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert same(run(tmp_path), whole)


def test_ctrl_c_saves_the_step_it_came_in(whole: TrainingRun, tmp_path: Path) -> None:
    def ctrl_c() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(TrainingInterrupted, match=r"after step 2 of 6.*step-00000002"):
        run(tmp_path, at(1, ctrl_c), checkpoint_every=100)
    assert signal.getsignal(signal.SIGINT) is before
    assert same(run(tmp_path, checkpoint_every=100), whole)


def test_ctrl_c_in_the_last_step_is_not_swallowed(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, at(6, lambda: os.kill(os.getpid(), signal.SIGINT)))
    assert (tmp_path / "training.json").exists()


def test_a_crash_while_a_checkpoint_is_written(
    whole: TrainingRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(checkpoints, "write_json", lambda path, record: crash())
        with pytest.raises(Crash):
            run(tmp_path)
    assert checkpoints.Checkpoints(tmp_path).all() == []
    assert same(run(tmp_path), whole)


def test_a_finished_run_is_read_back(whole: TrainingRun) -> None:
    lines: list[str] = []
    assert same(run(whole.folder, log=lines.append), whole)
    assert not lines


def test_two_runs_are_the_same_and_another_seed_is_another_run(whole: TrainingRun, tmp_path: Path) -> None:
    assert same(run(tmp_path / "same"), whole)
    assert not same(run(tmp_path / "other", seed=43), whole)
