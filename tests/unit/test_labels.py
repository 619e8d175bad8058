"""Labels are numbers of the model's classes, are mapped to them, or are refused where they are needed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import attnrx as rx
from attnrx.cli import main
from attnrx.data import Columns, ImageSet, Normalization, Splits, fit_labels, from_tensors
from attnrx.data.splits import imagenet_indices
from attnrx.show.checks import Accuracy, Fidelity
from attnrx.support.errors import DataError, UnknownName
from attnrx.vit.models import build_model
from attnrx_lab.checks.transfer import dataset_labels, num_dataset_classes
from attnrx_lab.comparison import Method, MethodBench, compare_methods
from attnrx_lab.vision_transformer import SCENARIOS
from support import cases

IMAGENETTE = {"tench": 0, "English springer": 217, "cassette player": 482, "chain saw": 491, "church": 497}
CONFIG = cases.CONFIGS["dense"]  # three classes


def images(classes: int, count: int = 20) -> ImageSet:
    generator = torch.Generator().manual_seed(0)
    shape = (count, CONFIG.channels, CONFIG.image_size, CONFIG.image_size)
    raw = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    return from_tensors("pets", raw, torch.arange(count) % classes, Normalization(CONFIG.mean, CONFIG.std))


def dataset(names: tuple[str, ...]) -> Splits:
    own = images(len(names))
    scale = Normalization(CONFIG.mean, CONFIG.std)
    return Splits("pets", own, own, own, names, CONFIG.channels, CONFIG.image_size, scale, rx.data.Augmentation(0))


def labels_of(split: ImageSet) -> list[int]:
    return torch.cat([batch.labels for batch in split.batches(7)]).tolist()


@pytest.fixture
def vit() -> nn.Module:
    return cases.model(CONFIG)


def test_labels_of_other_classes_are_refused_where_they_are_needed(vit: nn.Module) -> None:
    splits = rx.adapt_preprocessing(dataset(("cat", "dog", "fox", "owl", "yak")), vit)
    with pytest.raises(DataError, match=r"pets has 5 classes \(cat, dog, fox ...\) and the model 3.*--label-map"):
        rx.verify(vit, vit, splits.test, [Accuracy()])
    evidence = rx.verify(vit, vit, splits.test, [Fidelity()])
    assert evidence.of("fidelity")
    diagnosis = rx.diagnose(vit, splits.train)
    bench = MethodBench(vit, diagnosis, splits.train, splits.test)
    with pytest.raises(DataError, match="cannot be compared with the answers"):
        compare_methods(bench, [Method("mix", "total_rank:{share}")], (0.5,))


def test_a_label_map_gives_every_class_its_number(vit: nn.Module) -> None:
    whole = dataset(("cat", "dog"))
    splits = rx.adapt_preprocessing(whole, vit, {"cat": 2, "dog": 0})
    assert labels_of(splits.test) == [2, 0] * 10
    assert labels_of(splits.test.take(4)) == [2, 0, 2, 0]
    assert splits.class_names == ("dog", "1", "cat") and "mapped as given" in splits.notes[-1]
    (accuracy,) = (f for f in rx.verify(vit, vit, splits.test, [Accuracy()]).findings if "reference" in f.claim[-10:])
    batch = next(iter(whole.test.batches(20)))
    right = vit(batch.images.double()).argmax(-1) == torch.tensor([2, 0] * 10)
    assert accuracy.value == pytest.approx(100 * float(right.double().mean()))
    assert num_dataset_classes(splits) == 2 and labels_of(dataset_labels(splits.test)) == [0, 1] * 10


@pytest.mark.parametrize(
    ("label_map", "message"),
    [
        ({"cat": 1}, "gives 'dog' the number None; give every class of pets"),
        ({"cat": 1, "dog": 3}, "gives 'dog' the number 3; give every class of pets one of the model's classes, 0 to 2"),
        ({"cat": 1, "dog": -1}, "the number -1"),
        ({"cat": True, "dog": 0}, "the number True"),
        ({"cat": 1, "dog": 0, "owl": 2}, "unknown class of pets in the label map 'owl'"),
    ],
)
def test_a_map_that_does_not_fit_is_refused(vit: nn.Module, label_map: dict[str, int], message: str) -> None:
    with pytest.raises((DataError, UnknownName), match=message):
        rx.adapt_preprocessing(dataset(("cat", "dog")), vit, label_map)


def test_imagenet_subsets_bring_their_map() -> None:
    pytest.importorskip("timm")
    assert imagenet_indices(tuple(IMAGENETTE)) == tuple(IMAGENETTE.values())
    assert imagenet_indices(("n03888257", "n01440764")) == (701, 0)
    assert imagenet_indices(("airplane", "automobile", "bird")) is None
    assert imagenet_indices(("crane", "tench")) is None  # a bird and a machine
    fitted = fit_labels(dataset(tuple(IMAGENETTE)), 1000)
    assert labels_of(fitted.test)[:5] == list(IMAGENETTE.values())
    assert [fitted.class_names[number] for number in IMAGENETTE.values()] == list(IMAGENETTE)
    assert "and the model 21843" in str(fit_labels(dataset(tuple(IMAGENETTE)), 21843).test.label_problem)


def test_equal_counts_and_numbers_without_names_stay() -> None:
    for names, classes in ((("cat", "dog"), 2), (("0", "1", "2"), 1000)):
        whole = dataset(names)
        assert fit_labels(whole, classes) is whole
    assert fit_labels(dataset(("0", "1", "2")), 2).test.label_problem is not None


def test_the_command_takes_a_map_and_warns_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = build_model("svda:digits") if "digits" in SCENARIOS else build_model("svda:cifar10")
    slim = rx.save(model, tmp_path / "slim")
    table = tmp_path / "map.json"
    table.write_text(json.dumps({str(digit): (digit + 1) % 10 for digit in range(10)}))
    command = ["verify", str(slim), "--reference", str(slim), "--data", "digits", "--images", "60"]
    code = main([*command, "--checks", "accuracy", "--label-map", str(table)])
    shown = capsys.readouterr()
    assert code in (0, 1) and "warning: LABELS AT CHANCE LEVEL: the reference classifies" in shown.err
    assert "LABELS AT CHANCE LEVEL" in shown.out.splitlines()[-1]
    table.write_text("[1, 2]")
    assert main([*command, "--checks", "accuracy", "--label-map", str(table)]) == 2
    assert "give a JSON object" in capsys.readouterr().err


@pytest.mark.data
def test_imagenette_is_mapped_to_its_imagenet_numbers(real_data: Path) -> None:
    place = real_data / "imagenette224.parquet"
    columns = Columns(label_column="imagenet1k_label")
    own, expected = rx.load_data(place), rx.load_data(place, columns=columns)
    fitted = fit_labels(own, 1000)
    batches = [next(iter(each.test.batches(20))) for each in (fitted, expected)]
    assert batches[0].labels.tolist() == batches[1].labels.tolist()
    assert replace(own).test.label_problem is None
