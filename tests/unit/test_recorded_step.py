"""A recorded training step: its tensors, and what cannot be recorded."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from attnrx.support.errors import NotSupported
from attnrx.training import step as recorded_step
from attnrx.training.losses import Task
from attnrx.training.trainer import TrainingRun
from attnrx_lab.perturbation import TargetRank
from support.tiny_runs import run

ORDINARY = {"ema": None, "losses": (Task(),)}


def require_alike(plain: TrainingRun, replayed: TrainingRun) -> None:
    """The rates of a recorded step are tensors of float32: those of an ordinary one are Python's, in float64."""
    weights = replayed.model.state_dict()
    torch.testing.assert_close(dict(plain.model.state_dict()), dict(weights), rtol=1e-5, atol=1e-8)


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replays run the recorded step again; returns one entry for every recording."""
    recordings: list[int] = []

    def recorded(work: Callable[[], None]) -> Callable[[], None]:
        recordings.append(1)
        return work

    monkeypatch.setattr(recorded_step, "require_recordable", lambda *arguments: None)
    monkeypatch.setattr(recorded_step, "on_another_stream", lambda work: work())
    monkeypatch.setattr(recorded_step, "recorded", recorded)
    return recordings


def test_replays_take_their_batch_rate_and_step_from_tensors(on_a_cpu: list[int], tmp_path: Path) -> None:
    plain = run(tmp_path / "plain", **ORDINARY)
    replayed = run(tmp_path / "replayed", **ORDINARY, cuda_graph=True)
    assert len(on_a_cpu) == 1
    require_alike(plain, replayed)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({**ORDINARY}, "on a CPU;"),
        ({"ema": 0.9, "losses": (Task(),)}, "with ema"),
        ({"ema": None, "losses": (Task(), TargetRank(2.0))}, "with losses other than Task"),
    ],
)
def test_settings_that_cannot_be_recorded_are_refused(settings: dict, problem: str, tmp_path: Path) -> None:
    with pytest.raises(NotSupported, match=f"cuda_graph=True: a step cannot be recorded .*{problem}"):
        run(tmp_path, **settings, cuda_graph=True)
