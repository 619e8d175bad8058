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
TORCHRUN = ("torch.distributed.run", "--nproc_per_node=2")


def launched(launcher: tuple[str, ...], port: str, *words: str) -> dict[str, Any]:
    """Runs a command in two processes and gives the one JSON object that they print together."""
    command = [sys.executable, "-m", *launcher, f"{port}={free_port()}", "-m", "attnrx.cli", *words, "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_train_and_verify_in_two_processes(tmp_path: Path) -> None:
    """`accelerate launch` trains with weights in parts, `torchrun` verifies what that saved."""
    model, data = str(tmp_path / "model"), ("--data", "digits")
    knobs = ("--epochs", "1", "--batch-size", "512", "--parallel", "fsdp", "--out", model)
    result = launched(ACCELERATE, "--main_process_port", "train", "svda:digits", *data, *knobs)
    assert result["steps"] == 2
    assert read_json(tmp_path / "model" / "training.json")["processes"] == 2
    assert rx.models.family_of(rx.load(model)).name == "vit"

    evidence = str(tmp_path / "evidence.json")
    knobs = ("--reference", model, "--checks", "accuracy,fidelity", "--batch-size", "32", "--out", evidence)
    result = launched(TORCHRUN, "--master_port", "verify", model, *data, *knobs)
    assert result["outcome"] in ("holds", "reported")
    assert result["findings"] == read_json(evidence)["findings"]
    images = rx.adapt_preprocessing(rx.load_data("digits"), rx.load(model)).test
    alone = rx.verify(rx.load(model), rx.load(model), images, (rx.checks.Accuracy(),), batch_size=32)
    assert result["about"]["images"] == len(images)
    accuracy = [finding.value for finding in alone.of("accuracy")]
    assert [finding["value"] for finding in result["findings"] if finding["check"] == "accuracy"] == accuracy
