"""What `reproduce --dry-run` says before anything runs: the trainings of a recipe, their operations and their time."""

import json
from pathlib import Path

import pytest

from attnrx.cli import main
from attnrx.support.errors import InvalidInput, UnknownName
from attnrx_lab.papers import plan_recipes
from attnrx_lab.papers.plan import LEAST_STEP, PEAK, SHARE, training_images

COMPACT = 210_567_168 + 256 * 10  # MACs of SVDA's model for CIFAR-10, with its classifier


def test_a_training_is_counted_by_the_shapes_and_the_published_images(tmp_path: Path):
    planned = plan_recipes("svda/table1", only="cifar10", seeds=(42,), folder=tmp_path)
    (training,) = planned.trainings
    assert training.images == 45_000 and training.steps == 80 * 175  # a tenth is held out, and steps have 256 images
    # Three passes' worth of MACs for every image of every epoch, two operations each.
    operations = 2 * 3 * COMPACT * 80 * 45_000
    assert training.operations == pytest.approx(operations)
    # The model is so small that launches decide.
    assert operations / (SHARE * PEAK["bf16"]) < LEAST_STEP * 80 * 175
    assert training.hours == planned.hours == pytest.approx(LEAST_STEP * 80 * 175 / 3600)
    assert list(tmp_path.iterdir()) == []


def test_runs_that_recipes_share_are_planned_once(tmp_path: Path):
    names = ("svda/table1", "svda/table6")
    together = plan_recipes(names, only="cifar10", folder=tmp_path)
    assert together.recipes == names and together.deviations == ()
    assert [run.place for run in together.runs] == [f"svda/cifar10/seed-{seed}" for seed in (42, 43, 44)]
    (tmp_path / "svda/cifar10/seed-43").mkdir(parents=True)
    (tmp_path / "svda/cifar10/seed-43/result.json").write_text("{}")
    left = plan_recipes(names, only="cifar10", folder=tmp_path)
    assert [run.done for run in left.runs] == [False, True, False] and len(left.trainings) == 2
    assert left.hours == pytest.approx(together.hours * 2 / 3)


def test_spot_trains_its_method_beside_a_teacher_and_irratt_without(tmp_path: Path):
    pytest.importorskip("timm", reason="the shapes of DeiT come from timm")
    planned = plan_recipes("spot/table2", only="deit_small", seeds=(42,), folder=tmp_path)
    spot = next(each for each in planned.trainings if each.name == "deit_small, spot, seed 42")
    assert spot.images == 1_281_167 and spot.steps == 80 * 2502
    # Tokens are masked in training: the whole model and its predictors, and a forward pass of the teacher.
    assert spot.macs == pytest.approx(1e9 * (3 * (4.599 + 0.1291) + 4.599), rel=1e-3)
    assert spot.hours == pytest.approx(2 * spot.macs * 80 * 1_281_167 / (SHARE * PEAK["bf16"]) / 3600)
    (irratt,) = plan_recipes("irratt/table2", only="deit_base", folder=tmp_path).runs
    assert [each.name.rsplit(", ")[-1] for each in irratt.trainings] == [
        "truncatt-13-mlp",
        "cp-168-mlp",
        "irratt-168-mlp",
    ]
    assert 0.4 < irratt.trainings[-1].macs / (3 * 17.6e9) < 0.5


def test_what_is_small_or_unknown_is_said(tmp_path: Path):
    tiny = plan_recipes("svda/table1", tiny=True, folder=tmp_path)
    assert tiny.trainings == () and tiny.hours == 0 and any("tiny" in text for text in tiny.deviations)
    own = plan_recipes("svda/table1", only="cifar10", seeds=(42,), dataset="my/images", folder=tmp_path)
    assert own.trainings[0].images is None and own.hours == 0
    assert "only the data tell" in str(own)
    limited = plan_recipes("svda/table1", only="cifar10", seeds=(42,), train_images=2560, epochs=3, folder=tmp_path)
    assert limited.trainings[0].steps == 30
    assert {"cifar10: epochs = 3 instead of 80", "cifar10: train_images = 2560 instead of the default"} <= set(
        limited.deviations
    )
    assert training_images("cluttered-digits", 0.1) == pytest.approx(0.7 * 1797 * 6, rel=0.01)


def test_a_plan_refuses_what_reproduce_refuses(tmp_path: Path):
    with pytest.raises(UnknownName, match="cifar10"):
        plan_recipes("svda/table2", only="cifar", folder=tmp_path)
    with pytest.raises(InvalidInput, match="has no such knob"):
        plan_recipes("svda/table1", weights="w.safetensors", folder=tmp_path)


def test_the_command_prints_the_plan_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["reproduce", "svda/table1", "--only", "cifar10", "--dry-run", "--out", str(tmp_path / "runs")]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "cifar10, seed 42" in printed and "3 runs, 0 of them done; 3 trainings, 0.1 hours" in printed
    assert main([*words, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [each["steps"] for each in record["trainings"]] == 3 * [14_000] and "H100" in record["assumed"]
    assert list(tmp_path.iterdir()) == []
