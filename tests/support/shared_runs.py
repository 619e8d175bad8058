"""What several processes do together in the tests, and one process alone for comparison.

Run as a script, by a launcher or with the variables that a launcher sets, it does some of it in FOLDER:

    PYTHONPATH=tests python -m support.shared_runs FOLDER CASE...
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

import attnrx as rx
from attnrx.change.realization import realize
from attnrx.decide.diagnostics import Moments
from attnrx.training import TrainingRun, train
from attnrx.training.losses import Task
from attnrx.training.step import strengths_of
from support.tiny_runs import at, config, model, run, splits

# The knobs beside which two processes are compared with one: everything on that reads or changes weights.
COMPRESSED: dict[str, Any] = {"losses": (Task(0.1),), "strength_decay": 0.0}


@cache
def prescription() -> rx.Prescription:
    """Ragged ranks in the scores and in what is read out, thin maps in the MLP, and patches that leave."""
    diagnosis = rx.diagnose(strong(), splits().train, batch_size=8, diagnostics=(Moments(),))
    rules = "qk=energy_retention:0.9 vo=total_rank:0.6 fc1=total_rank:0.4 fc2=total_rank:0.4"
    return rx.prescribe(diagnosis, f"{rules} tokens=attention_received:0.5@2")


def strong() -> nn.Module:
    """The tiny model with strengths far from one another, so that heads keep different ranks."""
    made = model()
    with torch.no_grad():
        for strength in strengths_of(made):
            strength.mul_(torch.linspace(0.2, 3.0, len(strength), dtype=strength.dtype))
    return made


def compressed() -> nn.Module:
    small = realize(strong(), prescription())
    small.get_submodule("patches").requires_grad_(False)
    return small


def fine_tuned(folder: Path, **changes: Any) -> TrainingRun:
    return train(compressed(), splits(), config(**COMPRESSED | changes), folder)


def killed(folder: Path) -> None:
    """Trains in parts until the first process is gone without warning, after the checkpoint of step 4."""
    run(folder, at(4, lambda: os.kill(os.getpid(), signal.SIGKILL)), parallel="fsdp")


CASES: dict[str, Callable[[Path], Any]] = {
    "fresh-ddp": run,
    "fresh-fsdp": lambda folder: run(folder, parallel="fsdp"),
    "compressed-ddp": fine_tuned,
    "compressed-fsdp": lambda folder: fine_tuned(folder, parallel="fsdp"),
    "fresh-ddp-parts": lambda folder: run(folder, accumulate=2),
    "fresh-fsdp-parts": lambda folder: run(folder, parallel="fsdp", accumulate=4),
    "killed": killed,
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environments(processes: int) -> list[dict[str, str]]:
    """Returns the environment of every process, as `torchrun` and `accelerate launch` set it."""
    common = {"WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "OMP_NUM_THREADS": 1}
    common |= {"ACCELERATE_USE_CPU": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    added = [{**common, "RANK": rank, "LOCAL_RANK": rank} for rank in range(processes)]
    return [{**os.environ, **{name: str(value) for name, value in each.items()}} for each in added]


def start(folder: Path, cases: tuple[str, ...], processes: int = 2) -> list[subprocess.Popen]:
    """Starts processes that run the cases together."""
    command = [sys.executable, "-m", "support.shared_runs", str(folder), *cases]
    return [subprocess.Popen(command, env=each) for each in environments(processes)]


if __name__ == "__main__":
    for case in sys.argv[2:]:
        CASES[case](Path(sys.argv[1]) / case)
