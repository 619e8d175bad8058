"""Commands under the launchers that people use: two processes do one run, and one of them speaks and writes."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import attnrx as rx
from attnrx.support.storage import read_json
from support.shared_runs import environments, free_port

pytestmark = pytest.mark.slow

# What it calls several GPUs are several processes; with a CPU alone, it would start one.
TWO = ("--multi_gpu", "--num_processes=2", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no")
ACCELERATE = ("accelerate.commands.launch", *TWO, "--main_process_port")
TORCHRUN = ("torch.distributed.run", "--nproc-per-node", "2", "--master-port")


def launched(launcher: tuple[str, ...], *words: str) -> dict[str, Any]:
    """Runs a command in two processes and gives the one JSON object that they print together."""
    command = [sys.executable, "-m", *launcher, str(free_port()), "-m", "attnrx", *words, "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_train_in_two_processes(tmp_path: Path) -> None:
    """`accelerate launch` trains with weights in parts, and saves a whole model."""
    model, data = str(tmp_path / "model"), ("--data", "digits")
    knobs = ("--epochs", "1", "--batch-size", "512", "--parallel", "fsdp", "--out", model)
    result = launched(ACCELERATE, "train", "svda:digits", *data, *knobs)
    assert result["steps"] == 2
    assert read_json(tmp_path / "model" / "training.json")["processes"] == 2
    assert rx.models.family_of(rx.load(model)).name == "vit"


def test_reproduce_in_two_processes_which_are_killed_and_go_on(tmp_path: Path) -> None:
    """Both make the same run, in step: none waits for a lock that the other holds, and a killed launch continues."""
    words = ("reproduce", "svda/table1", "--only", "fashion_mnist", "--tiny", "--seeds", "42", "--out", str(tmp_path))
    command = [sys.executable, "-m", "attnrx", *words, "--epochs", "200"]
    started = [subprocess.Popen(command, env=each, stderr=subprocess.DEVNULL) for each in environments(2)]
    run = tmp_path / "svda" / "fashion_mnist-tiny" / "seed-42"
    try:
        deadline = time.monotonic() + 300
        while not list(run.glob("train/checkpoints/step-*")) and time.monotonic() < deadline:
            assert all(process.poll() is None for process in started)
            time.sleep(0.1)
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert not (run / "result.json").exists()  # it was killed in the training
    table = launched(TORCHRUN, *words, "--epochs", "200")
    assert read_json(run / "train" / "training.json")["processes"] == 2
    assert table["samples"] == {"fashion_mnist": {"seeds": [42], "images": 64}}
    assert {cell["column"] for cell in table["cells"]} >= {"removed", "discrepancy", "agreement"}
    assert (tmp_path / "svda" / "table1.md").exists()
