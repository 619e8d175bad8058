"""Commands under the launchers that people use: two processes do one run, and one of them speaks and writes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import attnrx as rx
from attnrx.support.storage import read_json
from support.shared_runs import free_port

pytestmark = pytest.mark.slow

# What it calls several GPUs are several processes; with a CPU alone, it would start one.
TWO = ("--multi_gpu", "--num_processes=2", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no")
ACCELERATE = ("accelerate.commands.launch", *TWO)


def launched(*words: str) -> dict[str, Any]:
    """Runs a command in two processes and gives the one JSON object that they print together."""
    port = f"--main_process_port={free_port()}"
    command = [sys.executable, "-m", *ACCELERATE, port, "-m", "attnrx", *words, "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_train_in_two_processes(tmp_path: Path) -> None:
    """`accelerate launch` trains with weights in parts, and saves a whole model."""
    model, data = str(tmp_path / "model"), ("--data", "digits")
    knobs = ("--epochs", "1", "--batch-size", "512", "--parallel", "fsdp", "--out", model)
    result = launched("train", "svda:digits", *data, *knobs)
    assert result["steps"] == 2
    assert read_json(tmp_path / "model" / "training.json")["processes"] == 2
    assert rx.models.family_of(rx.load(model)).name == "vit"
