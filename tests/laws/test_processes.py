"""Two processes with half of every batch each == one process with whole batches, to rounding."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attnrx.models import load_model
from attnrx.storage import read_json
from attnrx.training.history import History
from tiny_runs import run, weights

SCRIPT = Path(__file__).parents[1] / "tiny_runs.py"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(folder: Path, rank: int, port: int) -> subprocess.Popen:
    """One of two processes, told what `accelerate launch --cpu --num_processes 2` tells them."""
    told = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": 2,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "ACCELERATE_USE_CPU": "1",
        "OMP_NUM_THREADS": 1,
    }
    environment = {**os.environ, **{name: str(value) for name, value in told.items()}}
    return subprocess.Popen([sys.executable, str(SCRIPT), str(folder)], env=environment)


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path: Path) -> None:
    port = free_port()
    both = [start(tmp_path / "two", rank, port) for rank in range(2)]
    one = run(tmp_path / "one")
    assert [process.wait(timeout=300) for process in both] == [0, 0]
    assert read_json(tmp_path / "two" / "training.json")["processes"] == 2

    together = load_model(tmp_path / "two").state_dict()
    torch.testing.assert_close(together, weights(one), rtol=1e-9, atol=1e-11)
    history = History(tmp_path / "two")
    history.restore(2, write=False)
    for ours, theirs in zip(history.records, one.history, strict=True):
        for name in ("loss", "accuracy", "validation_accuracy", "validation_loss", "gradient_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-9)
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-9)
