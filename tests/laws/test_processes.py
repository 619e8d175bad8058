"""Two processes with half of every batch each == one process with whole batches, to rounding, however they share it."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from attnrx.support.storage import read_json
from attnrx.training import TrainingRun
from attnrx.training.checkpoints import Checkpoints
from attnrx.vit.models import load_model
from support.shared_runs import fine_tuned, start
from support.tiny_runs import run, weights

pytestmark = pytest.mark.slow

ALONE: dict[str, Callable[[Path], TrainingRun]] = {"fresh": run, "compressed": fine_tuned}
TRAINED = (
    *(f"{made}-{parallel}" for made in ALONE for parallel in ("ddp", "fsdp")),
    *(f"fresh-{parallel}-parts" for parallel in ("ddp", "fsdp")),  # each in two or four parts (accumulate)
)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes made, one case after the other: starting them takes longer than all they do."""
    folder = tmp_path_factory.mktemp("two")
    both = start(folder, (*TRAINED, "killed"))
    first, second = (process.wait(timeout=300) for process in both)
    assert first == -signal.SIGKILL, "the last case kills the first process"
    assert second != 0, "the other one cannot go on alone"
    return folder


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TrainingRun]:
    return {name: train(tmp_path_factory.mktemp(name)) for name, train in ALONE.items()}


def same_to_rounding(folder: Path, alone: TrainingRun) -> None:
    torch.testing.assert_close(load_model(folder).state_dict(), weights(alone), rtol=1e-9, atol=1e-11)
    for ours, theirs in zip(read_json(folder / "training.json")["history"], alone.history, strict=True):
        for name in ("loss", "accuracy", "validation_accuracy", "validation_loss", "gradient_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-9), name
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-9)


@pytest.mark.parametrize("case", TRAINED)
def test_two_processes_equal_one(case: str, two: Path, one: dict[str, TrainingRun]) -> None:
    assert read_json(two / case / "training.json")["processes"] == 2
    same_to_rounding(two / case, one[case.partition("-")[0]])


@pytest.mark.parametrize("case", ["fresh-fsdp", "compressed-fsdp"])
def test_checkpoints_of_weights_in_parts_are_whole(case: str, two: Path, one: dict[str, TrainingRun]) -> None:
    """They hold what those of one process hold, under the same names."""
    found, alone = (Checkpoints(folder).read() for folder in (two / case, one[case.partition("-")[0]].folder))
    assert found is not None
    assert alone is not None
    torch.testing.assert_close(found[1], alone[1], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("parts", [2, 8])
def test_a_step_in_parts_equals_a_whole_one(parts: int, tmp_path: Path, one: dict[str, TrainingRun]) -> None:
    same_to_rounding(run(tmp_path, accumulate=parts).folder, one["fresh"])


def test_one_process_goes_on_where_two_with_parts_were_killed(two: Path, one: dict[str, TrainingRun]) -> None:
    folder = two / "killed"
    assert not (folder / "training.json").exists()
    assert [path.name for path in Checkpoints(folder).all()] == ["step-00000002", "step-00000004"]
    resumed = run(folder)
    assert resumed.record["processes"] == 1
    same_to_rounding(folder, one["fresh"])
