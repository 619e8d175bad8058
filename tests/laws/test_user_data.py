"""Every form of a user's own data gives what the same images give as tensors, in every verb."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, WeightedRandomSampler

import attnrx as rx
from attnrx.data import Batch, ImageSet, image_set
from attnrx.data.model_data import images_for, splits_for
from attnrx.support.errors import DataError, InvalidInput
from attnrx_lab.checks import Controls, Transfer
from attnrx_lab.comparison import Method, MethodBench, compare_methods
from attnrx_lab.rules import control_prescriptions
from support import cases

COUNT = 13
CONFIG = cases.CONFIGS["dense"]


def model() -> nn.Module:
    return cases.model(CONFIG)


IMAGES = cases.images(CONFIG, COUNT)
LABELS = torch.arange(COUNT) % 3


class Items(Dataset[Any]):
    """A dataset with an index; `make` gives its items."""

    def __init__(self, make: Callable[[int], Any], count: int = COUNT):
        self.make, self.count = make, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> Any:
        if not 0 <= row < self.count:
            raise IndexError(row)
        return self.make(row)


class Stream(IterableDataset[Any]):
    """A dataset without an index."""

    def __iter__(self) -> Iterator[Any]:
        yield from zip(IMAGES, LABELS.tolist(), strict=True)


def pair(row: int) -> Any:
    return IMAGES[row], int(LABELS[row])


def named(row: int) -> Any:
    return {"pixel_values": IMAGES[row], "label": int(LABELS[row])}


def hugging_face() -> Any:
    datasets = pytest.importorskip("datasets")
    rows = {"image": IMAGES.tolist(), "label": LABELS.tolist()}
    found = datasets.Dataset.from_dict(rows)
    found.set_transform(lambda rows: {"image": [torch.tensor(each) for each in rows["image"]], "label": rows["label"]})
    return found


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(IMAGES.split(5), LABELS.split(5), strict=True))


FORMS: dict[str, Callable[[], Any]] = {
    "pair of tensors": lambda: (IMAGES, LABELS),
    "list of batches": batches,
    "list of mappings": lambda: [{"image": images, "labels": labels} for images, labels in batches()],
    "list of pairs": lambda: [pair(row) for row in range(COUNT)],
    "tensor dataset": lambda: TensorDataset(IMAGES, LABELS),
    "dataset of pairs": lambda: Items(pair),
    "dataset of mappings": lambda: Items(named),
    "subset": lambda: Subset(Items(pair, COUNT), range(COUNT)),
    "loader": lambda: DataLoader(TensorDataset(IMAGES, LABELS), batch_size=4),
    "loader of mappings": lambda: DataLoader(Items(named), batch_size=4),
    "shuffled loader": lambda: DataLoader(TensorDataset(IMAGES, LABELS), batch_size=4, shuffle=True),
    "loader with workers": lambda: DataLoader(Items(pair), batch_size=4, num_workers=2),
    "loader of a stream": lambda: DataLoader(Stream(), batch_size=4),
    "stream": Stream,
    "Hugging Face dataset": hugging_face,
}


def whole(data: ImageSet, batch_size: int = 6) -> Batch:
    parts = list(data.batches(batch_size))
    return Batch(*(torch.cat([getattr(part, name) for part in parts]) for name in ("images", "labels", "index")))


@pytest.mark.parametrize("form", FORMS)
def test_every_form_holds_the_same_images_in_the_same_order(form: str) -> None:
    data = images_for(model(), FORMS[form]())
    found = whole(data)
    assert len(data) == COUNT and data.has_labels and data.label_problem is None
    torch.testing.assert_close(found.images, IMAGES.to(found.images.dtype), rtol=0, atol=1e-7)
    assert torch.equal(found.labels, LABELS) and found.index.tolist() == list(range(COUNT))
    assert data.fingerprint == images_for(model(), FORMS[form]()).fingerprint


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_diagnosis_and_evidence(form: str) -> None:
    vit, data, expected = model(), FORMS[form](), FORMS["pair of tensors"]()
    mine, theirs = (rx.diagnose(vit, each, batch_size=COUNT) for each in (data, expected))
    for own, other in zip(mine.layers, theirs.layers, strict=True):
        for name in own.readings:
            torch.testing.assert_close(own.readings[name], other.readings[name], rtol=1e-5, atol=1e-6)
    slim = rx.realize(vit, rx.prescribe(mine, "total_rank:0.5"))
    first, second = (rx.verify(slim, vit, each, checks=(rx.checks.Accuracy(),)) for each in (data, expected))
    assert [finding.value for finding in first.findings] == [finding.value for finding in second.findings]


@pytest.mark.slow
def test_images_alone_are_enough_where_no_label_is_needed(tmp_path: Path) -> None:
    vit = model()
    diagnosis = rx.diagnose(vit, IMAGES)
    prescription = rx.prescribe(diagnosis, "total_rank:0.5")
    slim = rx.realize(vit, prescription)
    evidence = rx.verify(slim, vit, DataLoader(Items(lambda row: IMAGES[row]), batch_size=4))
    assert "accuracy" not in {finding.check for finding in evidence.findings}
    assert "fidelity" in {finding.check for finding in evidence.findings}
    assert any("not checked: accuracy" in note for note in evidence.about["notes"])
    with pytest.raises(DataError, match="the data has no labels"):
        rx.verify(slim, vit, IMAGES, checks=(rx.checks.Accuracy(),))
    rx.export(slim, tmp_path / "slim.pt2", "program", calibration=IMAGES)
    found = rx.plan(vit, diagnosis, "macs=0.97x", IMAGES, [-IMAGES], settings=rx.planning.PlanSettings(axes=("qk",)))
    assert set(found.expected) == {"divergence", "agreement"}
    found.save(tmp_path / "plan")
    planned = rx.Prescription.load(tmp_path / "plan" / "prescription.json")
    promises = rx.checks.Promises()
    kept = rx.realize(vit, planned)
    checked = rx.verify(kept, vit, FORMS["loader"](), checks=(promises,), prescription=planned)
    assert {finding.details["quantity"] for finding in checked.findings} == {
        "promised_divergence",
        "promised_agreement",
    }
    with pytest.raises(DataError, match="no labels"):
        rx.plan(vit, diagnosis, "max-drop=1pt", IMAGES, -IMAGES)


def test_few_images_of_a_sorted_dataset_are_of_all_classes() -> None:
    labels = torch.arange(12) // 4
    sorted_by_class = TensorDataset(IMAGES[:12], labels)
    taken = whole(images_for(model(), sorted_by_class).take(3))
    assert sorted(taken.labels.tolist()) == [0, 1, 2]
    listed = Items(lambda row: (IMAGES[row], int(labels[row])), 12)
    listed.targets = labels.tolist()  # type: ignore[attr-defined]
    assert sorted(whole(images_for(model(), listed).take(6)).labels.tolist()) == [0, 0, 1, 1, 2, 2]
    with pytest.raises(DataError, match="13 images were requested"):
        images_for(model(), sorted_by_class).take(13)


def test_other_samplers_decide_which_rows_there_are() -> None:
    sampler = WeightedRandomSampler([1.0, 1.0] + [0.0] * (COUNT - 2), 7)
    data = images_for(model(), DataLoader(TensorDataset(IMAGES, LABELS), batch_size=3, sampler=sampler))
    assert sorted(whole(data).index.tolist()) == [0, 1], "each row once"
    assert any("draws 7 images, 2 of them different" in note for note in data.notes)


class Shuffled(Stream):
    """A dataset without an index that yields another order in every pass."""

    passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(self.passes)).tolist()
        yield from (pair(row) for row in order)


@pytest.mark.parametrize("form", [Shuffled, lambda: DataLoader(Shuffled(), batch_size=4)])
def test_answers_of_several_passes_are_those_of_the_same_images(form: Callable[[], Any]) -> None:
    """Checks that run models in passes of their own give the evidence of the images in one order."""
    vit = model()
    diagnosis = rx.diagnose(vit, IMAGES)
    prescription = rx.prescribe(diagnosis, "total_rank:0.5")
    slim = rx.realize(vit, prescription)
    controls = control_prescriptions(diagnosis, prescription, draws=1)
    of_several_passes = (
        Controls(controls, lambda drawn: rx.realize(vit, drawn)),
        Transfer(image_set((IMAGES, LABELS)), 3, seeds=(0,), epochs=1),
    )
    for check in of_several_passes:
        first, second = (rx.verify(slim, vit, data, checks=(check,)) for data in (form(), (IMAGES, LABELS)))
        values = [[finding.value for finding in evidence.findings] for evidence in (first, second)]
        assert values[0] == pytest.approx(values[1])
        assert any("one fixed draw of 13" in note for note in first.about["notes"])
        assert not any("one fixed draw" in note for note in second.about["notes"])
    bench = MethodBench(vit, diagnosis, image_set(IMAGES), images_for(vit, form()))
    assert compare_methods(bench, [Method.parse("half=total_rank:{share}")], (0.5,))


def test_a_model_is_trained_on_a_loader(tmp_path: Path) -> None:
    config = rx.TrainingConfig(epochs=2, batch_size=4, seed=3)
    data = {"train": FORMS["loader"](), "validation": FORMS["tensor dataset"]()}
    run = rx.train(model(), data, config, tmp_path / "first")
    again = rx.train(model(), {**data, "train": FORMS["shuffled loader"]()}, config, tmp_path / "second")
    assert [run.history[-1][name] for name in ("loss", "validation_loss")] == [
        again.history[-1][name] for name in ("loss", "validation_loss")
    ]
    with pytest.raises(InvalidInput, match="its own order"):
        rx.train(model(), {**data, "train": Stream()}, config, tmp_path / "third")
    with pytest.raises(DataError, match="no validation images"):
        rx.train(model(), FORMS["loader"](), config, tmp_path / "fourth")
    with pytest.raises(InvalidInput, match="'trian'"):
        splits_for(model(), {"trian": IMAGES})


@pytest.mark.parametrize("kind", ["own", "timm"])
def test_pictures_are_preprocessed_as_the_model_wants_them(kind: str) -> None:
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (70, 50, 3), dtype=np.uint8))
    if kind == "own":
        vit = model()
        expected_shape, mean = (1, 8, 8), torch.tensor(CONFIG.mean)
    else:
        timm = pytest.importorskip("timm")
        source = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=1, num_classes=3)
        vit = rx.load(source)
        assert vit.pretrained_cfg == source.pretrained_cfg  # with the size of the published weights
        expected_shape, mean = (3, 32, 32), torch.tensor(source.pretrained_cfg["mean"])
    found = whole(images_for(vit, Items(lambda row: {"image": picture, "label": row}, 3)))
    assert found.images.shape == (3, *expected_shape) and found.labels.tolist() == [0, 1, 2]
    listed = whole(images_for(vit, [(picture, row) for row in range(3)]))
    assert torch.equal(listed.images, found.images) and listed.labels.tolist() == [0, 1, 2]
    if kind == "timm":
        from timm.data import create_transform, resolve_model_data_config

        transform: Any = create_transform(**{**resolve_model_data_config(vit), "input_size": expected_shape})
        assert torch.equal(found.images[0], transform(picture))
    assert (found.images.mean((0, 2, 3)) + mean).abs().max() < 1.5


def test_pictures_without_a_model_need_a_transform() -> None:
    picture = Image.new("RGB", (8, 8))
    with pytest.raises(InvalidInput, match="PIL pictures"):
        whole(image_set(Items(lambda row: picture)))
