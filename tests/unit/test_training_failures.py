"""What a training refuses, and what it says: bad input, numbers that are not finite, damaged or foreign checkpoints."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import attnrx as rx
from attnrx.support.errors import CheckpointError, InvalidInput, TrainingDiverged
from attnrx.support.storage import read_json
from attnrx.training import checkpoints, train
from attnrx.training.trainer import deterministic
from attnrx.vit.models import load_model
from attnrx_lab.vision_transformer import VisionTransformer, initialize_
from support.command_line import call
from support.pictures import write_folder
from support.tiny_runs import MODEL, at, config, model, run, splits


class Crash(BaseException):
    pass


def crash() -> None:
    raise Crash


def interrupted(folder: Path, step: int = 5) -> Path:
    with pytest.raises(Crash):
        run(folder, at(step, crash))
    return checkpoints.Checkpoints(folder).all()[-1]


def test_nan_stops_the_run_with_step_rate_and_the_last_good_checkpoint(tmp_path: Path) -> None:
    vit = model()

    def poison() -> None:
        with torch.no_grad():
            vit.classifier.bias[0] = float("nan")

    message = r"at step 4, with a learning rate of 0\.00\d+; the last good checkpoint is .*step-00000004"
    with pytest.raises(TrainingDiverged, match=message), at(4, poison):
        train(vit, splits(), config(), tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
    kept = [path.name for path in checkpoints.Checkpoints(tmp_path).all()]
    assert kept == ["step-00000002", "step-00000004"]


def test_nan_in_the_first_step_says_that_there_is_no_checkpoint(tmp_path: Path) -> None:
    vit = model()
    with torch.no_grad():
        vit.classifier.bias[0] = float("inf")
    with pytest.raises(TrainingDiverged, match=r"step 0.*there is no checkpoint yet"):
        train(vit, splits(), config(), tmp_path)


def test_a_batch_larger_than_the_data_is_refused(tmp_path: Path) -> None:
    def compute(*_: object) -> None:
        raise AssertionError("the batch is checked before anything is computed")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(InvalidInput, match="batch_size=27 is more than the 26"):
        patch.setattr(VisionTransformer, "forward", compute)
        train(model(), splits(), config(batch_size=27), tmp_path)


def test_a_batch_that_cannot_be_divided_into_parts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"batch_size=8 .* 1 processes, each in 3 parts \(accumulate\)"):
        train(model(), splits(), config(accumulate=3), tmp_path)


def test_the_command_takes_a_batch_that_the_data_allow(tmp_path: Path) -> None:
    data = write_folder(tmp_path / "pets", {"train": 10, "validation": 2, "test": 2})
    words = ("train", "svda:digits", "--data", data, "--epochs", 1, "--precision", "fp32", "--out")
    done = call(*words, tmp_path / "run")
    assert done.code == 0 and "pets has 30 training images: a batch is 7 of them" in done.err
    assert read_json(tmp_path / "run" / "training.json")["steps"] == 4
    refused = call(*words, tmp_path / "other", "--batch-size", 31)
    assert refused.code == 2 and "batch_size=31 is more than the 30" in refused.err


@pytest.mark.parametrize("name", ["lvvit:s", "hub:owner/name", "elastic@macs=0.6"])
def test_the_command_trains_the_model_that_it_loaded(name: str, tmp_path: Path, monkeypatch) -> None:
    data = write_folder(tmp_path / "pets", {"train": 4, "validation": 2, "test": 2})
    config = replace(MODEL, channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    loaded = initialize_(VisionTransformer(config), seed=1)
    monkeypatch.setattr(rx, "load", lambda *_, **__: loaded)
    settings = ("--epochs", 1, "--learning-rate", 1e-12, "--precision", "fp32")
    done = call("train", name, "--data", data, *settings, "--out", tmp_path / "run")
    assert done.code == 0, done.err
    expected, actual = (each.state_dict() for each in (loaded, load_model(tmp_path / "run")))
    assert all(torch.equal(expected[key], actual[key]) for key in expected)
    assert torch.allclose(actual["classifier.weight"], initialize_(VisionTransformer(config), 1).classifier.weight)


def test_another_run_in_the_same_folder_is_refused_with_every_difference(tmp_path: Path) -> None:
    interrupted(tmp_path)
    with pytest.raises(CheckpointError, match=r"config\.learning_rate was 0\.01 and is now 0\.02.*config\.seed was 42"):
        run(tmp_path, learning_rate=0.02, seed=1)


@pytest.mark.parametrize("step", [5, -1])
def test_the_weights_of_another_model_are_refused(step: int, tmp_path: Path) -> None:
    # Step -1 is never reached: the run ends.
    if step == 5:
        interrupted(tmp_path, step)
    else:
        run(tmp_path)
    other = model()
    with torch.no_grad():
        other.classifier.bias[0] += 1e-3
    with pytest.raises(CheckpointError, match=r"weights was '\w+' and is now '\w+'.*Train the same model"):
        train(other, splits(), config(), tmp_path)


def test_a_model_that_a_run_changed_goes_on_with_it(tmp_path: Path) -> None:
    vit = model()
    with pytest.raises(Crash), at(4, crash):
        train(vit, splits(), config(ema=None), tmp_path)
    assert train(vit, splits(), config(ema=None), tmp_path).record["steps"] == 6
    assert train(vit, splits(), config(ema=None), tmp_path).record["steps"] == 6


def test_a_finished_run_is_not_read_for_other_test_images(tmp_path: Path) -> None:
    run(tmp_path)
    with pytest.raises(CheckpointError, match=r"data\.test was"):
        train(model(), replace(splits(), test=splits().validation), config(), tmp_path)


def test_a_truncated_checkpoint_is_refused_and_the_one_before_named(tmp_path: Path) -> None:
    interrupted(tmp_path / "run")
    file = tmp_path / "run" / "checkpoints" / "step-00000004" / "state.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(
        CheckpointError, match=r"truncated.*Delete the folder .*step-00000004 to resume from step-00000002"
    ):
        run(tmp_path / "run")
    shutil.rmtree(file.parent)
    assert run(tmp_path / "run").record["steps"] == 6


def test_a_changed_checkpoint_is_refused(tmp_path: Path) -> None:
    file = interrupted(tmp_path) / "state.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="sha256"):
        run(tmp_path)


def test_a_history_that_lost_lines_is_written_again(tmp_path: Path) -> None:
    interrupted(tmp_path)
    (tmp_path / "history.jsonl").write_text("")
    assert [record["epoch"] for record in run(tmp_path).history] == [1, 2]
    assert len((tmp_path / "history.jsonl").read_text().splitlines()) == 2


def test_a_full_disk_stops_the_run_and_keeps_the_last_checkpoint(tmp_path: Path, monkeypatch) -> None:
    def full(*_: object) -> None:
        raise CheckpointError("cannot write: No space left on device")

    with monkeypatch.context() as patched, pytest.raises(CheckpointError, match="No space"):
        run(tmp_path, at(3, lambda: patched.setattr(checkpoints, "write_tensors", full)))
    assert [path.name for path in checkpoints.Checkpoints(tmp_path).all()] == ["step-00000002"]
    assert not list((tmp_path / "checkpoints").glob(".*"))
    assert run(tmp_path).record["steps"] == 6


def test_a_checkpoint_that_the_disk_changed_is_never_there(tmp_path: Path, monkeypatch) -> None:
    write = checkpoints.write_tensors

    def changing(path: Path, tensors: dict) -> Path:
        return write(path, {name: tensor + 1 if "classifier" in name else tensor for name, tensor in tensors.items()})

    with monkeypatch.context() as patched, pytest.raises(CheckpointError, match="the disk is not reliable"):
        run(tmp_path, at(3, lambda: patched.setattr(checkpoints, "write_tensors", changing)))
    assert [path.name for path in checkpoints.Checkpoints(tmp_path).all()] == ["step-00000002"]


def test_two_checkpoints_stay(tmp_path: Path) -> None:
    run(tmp_path, checkpoint_every=1)
    assert [path.name for path in checkpoints.Checkpoints(tmp_path).all()] == ["step-00000005", "step-00000006"]


def test_the_folder_is_a_model_with_the_mean_of_its_weights(tmp_path: Path) -> None:
    made = run(tmp_path)
    saved = load_model(tmp_path).state_dict()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in made.model.state_dict().items())
    last = checkpoints.Checkpoints(tmp_path).read()
    assert last is not None
    assert torch.equal(last[1]["mean/classifier.weight"], saved["classifier.weight"])
    assert not torch.equal(last[1]["model/classifier.weight"], saved["classifier.weight"])
    assert made.record["accuracy"]["best_validation"] >= made.record["accuracy"]["validation"]


@pytest.mark.parametrize(("required", "warn_only"), [(False, True), (True, True), (True, False)])
def test_determinism_that_the_caller_requires_is_not_weakened(required: bool, warn_only: bool) -> None:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        torch.use_deterministic_algorithms(required, warn_only=warn_only)
        with deterministic():
            assert torch.are_deterministic_algorithms_enabled()
            assert torch.is_deterministic_algorithms_warn_only_enabled() == warn_only
        assert torch.are_deterministic_algorithms_enabled() == required
        assert torch.is_deterministic_algorithms_warn_only_enabled() == warn_only
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
