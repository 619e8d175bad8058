"""The SPOT experiments on tiny models: what is trained and by what, runs that go on, originals that are shared."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attnrx.data import Normalization, load_data
from attnrx.support.errors import CheckpointError, DataError, InvalidInput
from attnrx.training.losses import Task
from attnrx.vit.models import reduction_of, save_model
from attnrx.workflows.load import load
from attnrx_lab.clutter import object_finding
from attnrx_lab.cluttered_digits import CLUTTERED, object_patches
from attnrx_lab.corruptions import CORRUPTIONS
from attnrx_lab.papers.corrupted import CorruptedExperiment
from attnrx_lab.papers.kept import KeptPatchesExperiment
from attnrx_lab.papers.spot import ORIGINALS, FineTuning, SpotExperiment, TokenMethod
from attnrx_lab.papers.spot import TINY as TINY_ORIGINAL
from attnrx_lab.papers.spot_tables import RECIPES, SUBJECTS, at
from attnrx_lab.papers.transferred import TransferExperiment
from attnrx_lab.tokens import Random
from support.pictures import write_tree

pytestmark = pytest.mark.usefixtures("single_precision")

SPOT, RANDOM = TokenMethod("spot", "spot"), TokenMethod("random", "random")
TOME, ORIGINAL = TokenMethod("tome", "tome", trained=False), TokenMethod("all", trained=False)


def tiny(method: TokenMethod, seed: int = 42) -> SpotExperiment:
    return replace(SUBJECTS["cifar10_small"], method=method, seed=seed).as_tiny()


def made(experiment: SpotExperiment, root: Path):
    return experiment.run(root / experiment.place)


@pytest.mark.parametrize(("depth", "stages"), [(12, (4, 7, 10)), (16, (5, 9, 13)), (4, (2, 3, 4))])
def test_stages_are_one_layer_after_each_quarter(depth: int, stages: tuple[int, ...]):
    policy = at(SPOT, 0.5).policy(depth)
    assert policy is not None
    assert policy.layers == stages
    assert policy.keep == (0.5, 0.25, 0.125)
    assert ORIGINAL.policy(depth) is None


def test_what_every_method_learns_by():
    tuned = replace(SUBJECTS["deit_small"], tuning=FineTuning(similarity=10.0), seed=1)
    configs = {
        method.name: replace(tuned, method=method).training("teacher")
        for method in (SPOT, RANDOM, TokenMethod("dense"))
    }
    names = {name: [type(loss).__name__ for loss in config.losses] for name, config in configs.items()}
    assert names == {
        "spot": ["Task", "Distillation", "KeepRatio", "TokenSimilarity"],
        "random": ["Task", "Distillation"],
        "dense": ["Task", "Distillation"],
    }
    config = configs["spot"]
    assert [loss.weight for loss in config.losses] == [1.0, 0.5, 2.0, 10.0]  # Eq. 15, Appendix 6.2
    assert (config.learning_rate, config.predictor_learning_rate, config.seed) == (1e-3, 10.0, 1)
    assert config.losses[0] == Task(label_smoothing=0.0)  # Eq. 11
    assert config.gradient_clip is None
    unlabelled = replace(tuned, tuning=FineTuning(task=False), method=RANDOM)
    assert not unlabelled.training("teacher").reads_labels


@pytest.mark.slow
def test_the_original_is_trained_once_and_never_changed(tmp_path: Path):
    requested = ((SPOT, 1), (SPOT, 2), (TOME, 1), (ORIGINAL, 1))
    runs = [made(tiny(method, seed), tmp_path) for method, seed in requested]
    shared = tmp_path / "spot" / "cifar10_small-tiny"
    assert {path.name for path in shared.iterdir() if path.is_dir()} == {"all", "spot", "tome"}
    assert [path.name for path in (tmp_path / "spot" / "originals").iterdir() if path.is_dir()] == [shared.name]
    assert len({run.record["model"]["fingerprint"] for run in runs}) == 1
    change = runs[3].measure("all", "measured", "accuracy_change")
    assert change is not None and change["value"] == 0
    assert [(run.folder / "train").exists() for run in runs] == [True, True, False, False]


def test_seeds_draw_other_predictors(tmp_path: Path):
    stages = []
    for seed in (1, 2):
        run = made(tiny(SPOT, seed), tmp_path)
        reduction = reduction_of(load(run.folder / "train"))
        assert reduction is not None and str(reduction.policy) == "spot:0.7@2,3,4"
        stages.append(torch.cat([tensor.flatten() for tensor in reduction.stages.state_dict().values()]))
    assert not torch.equal(*stages)


def test_a_run_goes_on_where_it_was_stopped(tmp_path: Path):
    experiment = tiny(SPOT)
    first = made(experiment, tmp_path)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("model*") if path.is_file()}
    for name in ("result.json", "evidence.json"):
        (first.folder / name).unlink()
    again = made(experiment, tmp_path)
    assert again.record == first.record
    assert times and times == {path: path.stat().st_mtime_ns for path in times}
    with pytest.raises(CheckpointError, match="epochs was 1 and is now 2"):
        experiment.changed({"epochs": 2}).run(first.folder)


def test_the_oracle_keeps_the_digit_first_and_the_share_is_measured() -> None:
    images = load_data(CLUTTERED).test.take(24)
    model, seed = ORIGINALS["cluttered_digits"].build(Normalization((0.1268,), (0.1959,))), 3
    TokenMethod("oracle", "oracle", 0.5).attach_(model, seed)
    reduction = reduction_of(model)
    assert reduction is not None and str(reduction.policy) == "oracle(seed=3):0.5@2,3,4"
    objects = object_patches("test")
    shares = [object_finding(model, images, objects, "object_patches", stage).value for stage in ("first", "last")]
    assert shares == [100.0, 100.0]
    reduction.policy = replace(reduction.policy, reducer=Random(seed))
    assert 0 < object_finding(model, images, objects, "object_patches").value < 35  # 12 of 100 patches remain


def test_a_run_on_the_testbed_counts_the_patches_of_the_objects(tmp_path: Path) -> None:
    experiment = replace(SUBJECTS["cluttered_digits"], method=at(RANDOM, 0.5)).as_tiny()
    run = made(experiment, tmp_path)
    names = ("object_patches_first", "object_patches_last", "accuracy_by_group")
    first, last, accuracy = (run.measure("random-0.5", "measured", name) for name in names)
    assert first is not None and last is not None and 0 < last["value"] < first["value"] < 80
    assert accuracy is not None and len(accuracy["samples"]) == 64


def test_corrupted_images_are_measured_on_the_model_of_the_clean_run(tmp_path: Path):
    drawn = CorruptedExperiment.of(tiny(RANDOM))
    found = drawn.run(tmp_path / drawn.place)
    clean = tmp_path / tiny(RANDOM).place
    assert (clean / "train" / "training.json").exists() and not (found.folder / "train").exists()
    change = found.measure("random", "measured", "corrupted_change")
    accuracy = found.measure("random", "measured", "corrupted_accuracy")
    assert change is not None and change["low"] <= change["value"] <= change["high"]
    assert accuracy is not None and 0 < accuracy["value"] <= 100
    assert "not read from ImageNet-C" in drawn.differences[0]


def test_corrupted_images_are_read_from_the_authors_folders(tmp_path: Path):
    for number, corruption in enumerate(CORRUPTIONS):
        # The archives put kinds of corruptions into folders, and another severity is not read.
        write_tree(tmp_path / "c" / f"kind-{number % 3}" / corruption, "3/a 3/b 3/c 3/d 5/a", 2)
    read = replace(CorruptedExperiment.of(tiny(ORIGINAL)), corrupted=str(tmp_path / "c"))
    found = read.run(tmp_path / "runs" / read.place)
    change, accuracy = (found.measure("all", "measured", f"corrupted_{name}") for name in ("change", "accuracy"))
    assert change is not None and change["value"] == 0 and change["low"] < 0 < change["high"]
    # Eight images of each corruption, equal in all of them.
    assert accuracy is not None and accuracy["value"] / 12.5 == pytest.approx(round(accuracy["value"] / 12.5))
    assert read.differences == ()
    missing = replace(read, corrupted=str(tmp_path / "c" / "kind-0"), seed=1)
    with pytest.raises(DataError, match=r"has no folder .*/3, as ImageNet-C has"):
        missing.run(tmp_path / "other" / missing.place)
    assert not (tmp_path / "other" / "spot").exists()


def transferred(target: str = "dtd", **changes: object) -> TransferExperiment:
    protocol = next(each for each in RECIPES["table4"].protocol if each.scenario == target)
    assert isinstance(protocol, TransferExperiment)
    return replace(protocol, **changes)  # type: ignore[arg-type]


def test_new_heads_are_trained_on_the_model_of_the_clean_run(tmp_path: Path):
    experiment = transferred().as_tiny()
    found = experiment.run(tmp_path / experiment.place)
    clean = tmp_path / "spot" / "deit_tiny-tiny" / "spot" / "seed-42" / "train"
    before, after, change = (
        found.measure(rule, "measured", name)
        for rule, name in (("all-tokens", "accuracy"), ("spot", "accuracy"), ("spot", "accuracy_change"))
    )
    assert before is not None and after is not None and change is not None
    assert change["value"] == pytest.approx(after["value"] - before["value"])
    assert found.record["data"]["images"] == 64
    # The same model given: nothing is fine-tuned, and the numbers are the same.
    given = replace(experiment, tuned=str(clean))
    again = given.run(tmp_path / "given" / given.place)
    assert again.record["rules"] == found.record["rules"]
    assert not (tmp_path / "given" / "spot" / "deit_tiny-tiny").exists()
    assert given.trainings() == () and given.changed({"tuned": str(clean)}) == given
    without_tokens = replace(experiment, tuned=str(tmp_path / "spot" / "originals" / "deit_tiny-tiny"), seed=1)
    with pytest.raises(InvalidInput, match="prunes no tokens"):
        without_tokens.run(tmp_path / "other" / without_tokens.place)


def test_a_target_is_read_as_published_and_its_validation_images_are_trained_on(tmp_path: Path):
    root = write_tree(tmp_path / "dtd" / "images", "banded dotted", 6).parent
    (root / "labels").mkdir()
    for number, split in enumerate(("train", "val", "test")):
        lines = [f"{name}/{place}-{number}.png" for place, name in enumerate(("banded", "dotted"))]
        (root / "labels" / f"{split}1.txt").write_text("\n".join(lines))
    model = save_model(tmp_path / "model", TINY_ORIGINAL.build())
    experiment = transferred(model=str(model), transfer=str(root), classes=2)
    splits = experiment.transferred()
    assert (len(splits.train), len(splits.test)) == (4, 2)
    (batch,) = splits.train.batches(4)
    assert batch.labels.tolist() == [0, 1, 0, 1]
    own = load_data(root, image_size=16)
    parts = [next(images.batches(2)).images for images in (own.train, own.validation)]
    assert torch.equal(batch.images, torch.cat(parts)) and not torch.equal(*parts)
    with pytest.raises(DataError, match=r"has 2 classes and dtd has 47"):
        replace(experiment, classes=47).transferred()
    protocol = transferred()
    assert replace(protocol, transfer=str(root)).deviations(protocol) == []  # the published images, elsewhere
    assert len(replace(protocol, transfer=str(tmp_path / "mine")).deviations(protocol)) == 1


def test_absent_images_are_named_with_their_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    pytest.importorskip("timm", reason="the shapes of DeiT come from timm")
    monkeypatch.delenv("ATTNRX_DATA", raising=False)
    for target, source in (("dtd", "Describable Textures"), ("eurosat", "EuroSAT_RGB.zip")):
        with pytest.raises(DataError, match=rf"{target} are on no hub: download them from .*{source}.*ATTNRX_DATA"):
            transferred(target).run(tmp_path / target)
    assert list(tmp_path.rglob("*.json")) == []


def test_parts_of_a_step_are_no_other_run(tmp_path: Path):
    experiment = SUBJECTS["deit_small"]
    parts = replace(experiment, accumulate=4)
    assert experiment.changed({"accumulate": 4}) == parts and parts.deviations(experiment) == []
    assert parts.training("teacher").accumulate == 4
    experiment.claim(tmp_path)
    parts.require(tmp_path)


def test_kept_patches_are_drawn_for_the_model_of_the_clean_run(tmp_path: Path):
    pytest.importorskip("matplotlib")
    experiment = KeptPatchesExperiment.of(tiny(SPOT))
    found = experiment.run(tmp_path / experiment.place)
    files = sorted(path.name for path in found.folder.glob("kept-patches.*"))
    assert files == ["kept-patches.csv", "kept-patches.pdf", "kept-patches.svg"]
    shares = [found.measure("spot", "measured", f"left_{stage}") for stage in (1, 2, 3)]
    policy = SPOT.policy(4)
    assert policy is not None
    assert [share and share["value"] for share in shares] == [100 * kept / 16 for kept in policy.counts(16)]
