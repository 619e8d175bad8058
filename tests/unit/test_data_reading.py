"""From a name or a path to three splits: every storage format, and what is decided on the way."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from attnrx.data import DATASETS, Columns, image_set, load_data, require_labels
from attnrx.data.formats import Opened
from attnrx.data.images import evenly_spaced
from attnrx.data.loading import locate
from attnrx.support.errors import DataError
from support.pictures import (
    CLASSES,
    assert_labels_belong,
    everything,
    grey,
    rows,
    sizes,
    write_folder,
    write_parquet,
    write_tree,
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copies of tables go to a folder of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("ATTNRX_DATA", raising=False)
    return tmp_path / "cache" / "attnrx"


# formats


def test_one_parquet_file_with_a_split_column(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "pets.parquet", rows(60) + rows(12, "test"))
    splits = load_data(path)
    assert (splits.name, sizes(splits), splits.class_names) == ("pets", (54, 6, 12), CLASSES)
    assert (splits.channels, splits.image_size) == (3, 8)
    assert_labels_belong(splits)
    assert any("no validation split: 6 training images" in note for note in splits.notes)
    train, validation = everything(splits, "train")[2], everything(splits, "validation")[2]
    assert torch.equal(torch.cat([train, validation]).sort().values, torch.arange(60))
    assert everything(splits, "validation")[1].bincount().tolist() == [2, 2, 2]
    assert torch.equal(everything(splits, "test")[2], torch.arange(60, 72))


def test_files_with_columns_in_another_order_are_one_table_and_others_are_refused(tmp_path: Path) -> None:
    import pyarrow.parquet as parquet

    write_parquet(tmp_path / "train-0.parquet", rows(30))
    second = parquet.read_table(write_parquet(tmp_path / "train-1.parquet", rows(30)))
    parquet.write_table(second.select(second.column_names[::-1]), tmp_path / "train-1.parquet")
    assert sum(sizes(load_data(tmp_path))) == 60
    parquet.write_table(second.append_column("more", second.column("label")), tmp_path / "train-1.parquet")
    with pytest.raises(DataError, match=r"as one table.*must be whole and have the same columns"):
        load_data(tmp_path)


def test_one_parquet_file_per_split_as_on_the_hub(tmp_path: Path) -> None:
    for name, count in (("train-00000-of-00002", 30), ("train-00001-of-00002", 12), ("val-0", 9), ("test", 6)):
        write_parquet(tmp_path / "data" / f"{name}.parquet", rows(count))
    splits = load_data(tmp_path)
    assert sizes(splits) == (42, 9, 6)
    assert_labels_belong(splits)
    assert [note for note in splits.notes if "the labels are the column 'label'" not in note] == []
    with pytest.raises(DataError, match="not a pattern"):
        load_data(str(tmp_path / "data" / "*.parquet"))


def test_other_column_names(tmp_path: Path) -> None:
    content = [{"photo": row["image"], "kind": row["label"]} for row in rows(30)]
    path = write_parquet(tmp_path / "other.parquet", content, names=None)
    with pytest.raises(DataError, match=r"no image column 'image' \(it has photo, kind\).*columns=Columns"):
        load_data(path)
    splits = load_data(path, columns=Columns(image_column="photo", label_column="kind"))
    assert splits.class_names == ("0", "1", "2")
    assert_labels_belong(splits)
    content = [{"img": row["image"], "fine_label": row["label"]} for row in rows(30)]
    usual = load_data(write_parquet(tmp_path / "cifar100.parquet", content, names=None))
    assert usual.class_names == ("0", "1", "2") and usual.image_size == 32


def test_words_as_labels(tmp_path: Path) -> None:
    content = [{"image": row["image"]["bytes"], "label": row["label_name"]} for row in rows(30)]
    splits = load_data(write_parquet(tmp_path / "words.parquet", content, names=None))
    assert splits.class_names == CLASSES
    assert_labels_belong(splits)


def test_a_folder_with_splits(tmp_path: Path) -> None:
    splits = load_data(write_folder(tmp_path / "pets", {"train": 10, "val": 2, "test": 3}))
    assert sizes(splits) == (30, 6, 9)
    assert splits.class_names == CLASSES
    assert_labels_belong(splits)


def test_a_folder_without_splits_is_divided_by_the_names_of_the_files(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "pets", {"": 20})
    (root / "cat" / "notes.txt").write_text("not an image")
    splits = load_data(root)
    assert sizes(splits) == (42, 6, 12)
    assert_labels_belong(splits)
    before = everything(splits, "test")[0]
    moved = root.rename(tmp_path / "elsewhere")
    assert torch.equal(everything(load_data(moved, seed=9), "test")[0], before)


@pytest.mark.slow
def test_digits_need_nothing() -> None:
    splits = load_data("digits", validation_share=0.2)
    assert (splits.channels, splits.image_size, len(splits.class_names)) == (1, 16, 10)
    assert sum(sizes(splits)) == 1797
    assert sizes(splits)[2] == 359
    whole = load_data("digits", validation_share=0)
    assert len(whole.train) == 1797 - 359
    with pytest.raises(DataError, match="no validation images"):
        len(whole.validation)
    assert load_data("digits", image_size=8).train.batches(4).__next__().images.shape == (4, 1, 8, 8)
    images = torch.cat([batch.images for batch in load_data("digits", image_size=8).train.batches(500)])
    assert abs(float(images.mean())) < 0.02
    assert float(images.std()) == pytest.approx(1, abs=0.02)


def test_fashion_mnist_is_padded(tmp_path: Path) -> None:
    content = [{"image": {"bytes": grey(100 + i % 10, 28), "path": ""}, "label": i % 10} for i in range(40)]
    path = write_parquet(tmp_path / "fashion_mnist.parquet", content, names=None)
    splits = load_data(path)
    pixels, labels, _ = everything(splits, "train")
    assert pixels.shape[1:] == (1, 32, 32)
    assert torch.equal(pixels[:, 0, 2, 2].long(), 100 + labels)
    assert pixels[:, 0, :2].abs().max() == 0
    assert splits.normalization == DATASETS["fashion_mnist"].normalization
    assert everything(load_data(path, image_size=16), "train")[0][:, 0, 0, 0].min() >= 100, "resized, not padded"


# choices


def test_the_seed_moves_validation_but_never_a_held_out_test(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "pets.parquet", [{k: r[k] for k in ("image", "label")} for r in rows(90)])
    first, again, other = (load_data(path, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(everything(first, "test")[2], everything(other, "test")[2])
    assert torch.equal(everything(first, "validation")[2], everything(again, "validation")[2])
    assert not torch.equal(everything(first, "validation")[2], everything(other, "validation")[2])
    parts = torch.cat([everything(first, split)[2] for split in ("train", "validation", "test")])
    assert torch.equal(parts.sort().values, torch.arange(90))


def test_a_known_name_is_found_in_the_folder_of_local_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(tmp_path / "cifar10.parquet", rows(30) + rows(6, "test"))
    monkeypatch.setenv("ATTNRX_DATA", str(tmp_path))
    splits = load_data("cifar10")
    assert (splits.name, splits.image_size) == ("cifar10", 32)
    assert any("cifar10.parquet" in note for note in splits.notes)


def test_a_hub_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    path = write_parquet(tmp_path / "pets.parquet", [{k: r[k] for k in ("image", "label")} for r in rows(30)])
    requested: list[Any] = []

    def from_hub(hub_id: str, **options: Any) -> datasets.DatasetDict:
        requested.append((hub_id, options))
        local = datasets.Dataset.from_parquet(str(path), cache_dir=str(tmp_path / "hub"))
        local = local.rename_columns({"image": "img", "label": "fine_label"})  # type: ignore[union-attr]
        return datasets.DatasetDict({"train": local, "test": local, "unlabelled": local})

    monkeypatch.setattr(datasets, "load_dataset", from_hub)
    splits = load_data("cifar100")
    options = {"data_dir": None, "revision": None, "trust_remote_code": False}
    assert requested == [("uoft-cs/cifar100", options)]
    assert (splits.class_names, sizes(splits), splits.image_size) == (CLASSES, (27, 3, 30), 32)
    assert any("'unlabelled' is neither" in note for note in splits.notes)
    other = load_data("hf:owner/pets", columns=Columns("img", "fine_label"))
    assert other.image_size == 8
    assert_labels_belong(other)


def test_an_unreachable_hub_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def unreachable(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach 'ethz/food101' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(DataError, match=r"ethz/food101.*Couldn't reach.*local copy.*ATTNRX_DATA"):
        load_data("food101")


# the catalogue and the real files


@pytest.mark.data
@pytest.mark.parametrize(("name", "counts"), [("fashion_mnist", (60000, 10000)), ("cifar10", (50000, 10000))])
def test_the_real_files(real_data: Path, name: str, counts: tuple[int, int]) -> None:
    opened = locate(real_data / f"{name}.parquet", Columns()).open()
    assert isinstance(opened, Opened)
    assert tuple(len(opened.splits[split]) for split in ("train", "test")) == counts
    card = DATASETS[name]
    train = opened.splits["train"]
    pictures = [train.picture(row, card.geometry.channels) for row in evenly_spaced(len(train), 400)]
    pixels = torch.stack(pictures).transpose(0, 1).flatten(1) / 255.0
    assert torch.allclose(pixels.mean(1), torch.tensor(card.normalization.mean), atol=0.03)
    assert torch.allclose(pixels.std(1), torch.tensor(card.normalization.std), atol=0.03)


def unlabelled(count: int, split: str = "train") -> list[dict]:
    return [{"image": row["image"], "split": row["split"], "weight": 3} for row in rows(count, split)]


def test_a_table_without_labels_has_images_alone(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "images.parquet", [*unlabelled(20), *unlabelled(6, "test")], None)
    splits = load_data(path)
    assert splits.class_names == () and not splits.test.has_labels
    assert any("without labels" in note and "weight" in note for note in splits.notes)
    labels = torch.cat([batch.labels for batch in splits.train.take(5).batches(2)])
    assert labels.tolist() == [-1] * 5
    with pytest.raises(DataError, match=r"has no labels, and this needs them: name their column \(--label-column"):
        require_labels(splits.test)
    with pytest.raises(DataError, match="no label column 'kind'"):
        load_data(path, columns=Columns(label_column="kind"))
    labelled = write_parquet(tmp_path / "labelled.parquet", [*rows(20), *rows(6, "test")])
    assert load_data(labelled).test.has_labels


def columns_of(count: int, **names: str) -> list[dict]:
    """Rows with images, and columns of numbers, words or lists by name."""
    makes: dict[str, Callable[[int], Any]] = {"number": lambda i: i % 3, "word": lambda i: CLASSES[i % 3]}
    makes |= {"numbers": lambda i: [i], "float": lambda i: i / 7}
    pictures = rows(count)
    return [
        {"image": row["image"], **{name: makes[kind](i) for name, kind in names.items()}}
        for i, row in enumerate(pictures)
    ]


@pytest.mark.parametrize("name", ["gt_label", "class", "category", "label_id", "classId", "coarse_label", "Target"])
@pytest.mark.parametrize("kind", ["number", "word"])
def test_the_one_column_that_is_named_like_a_label_is_taken_and_named(tmp_path: Path, name: str, kind: str) -> None:
    splits = load_data(write_parquet(tmp_path / "a.parquet", columns_of(30, **{name: kind, "weight": "number"}), None))
    assert_labels_belong(splits)
    assert any(note.startswith(f"the labels are the column {name!r};") for note in splits.notes)


def test_a_column_of_classes_by_the_schema_is_taken(tmp_path: Path) -> None:
    import datasets

    features = datasets.Features(
        {"image": datasets.Image(), "breed": datasets.ClassLabel(names=list(CLASSES)), "age": datasets.Value("int64")}
    )
    content = [{"image": row["image"], "breed": row["label"], "age": 3} for row in rows(30)]
    datasets.Dataset.from_list(content, features=features).to_parquet(str(tmp_path / "a.parquet"))
    splits = load_data(tmp_path / "a.parquet")
    assert splits.class_names == CLASSES
    assert_labels_belong(splits)


def test_several_columns_that_may_be_labels_are_named(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", columns_of(30, class_id="number", class_name="word"), None)
    with pytest.raises(DataError, match=r"may be the label: class_id, class_name .*Give --label-column class_id"):
        load_data(path)
    assert load_data(path, columns=Columns(label_column="class_name")).class_names == CLASSES
    usual = columns_of(30, label="number", imagenet_label="number")
    notes = load_data(write_parquet(tmp_path / "b.parquet", usual, None)).notes
    assert any("are the column 'label' (imagenet_label may be labels too)" in note for note in notes)
    for kind in ("numbers", "float"):  # of no class
        splits = load_data(write_parquet(tmp_path / f"{kind}.parquet", columns_of(30, gt_label=kind), None))
        assert any("it has image, gt_label" in note for note in splits.notes)


def test_keys_of_items_that_may_be_labels_are_named() -> None:
    items = [{"image": torch.randn(3, 8, 8), "gt_label": 1} for _ in range(4)]
    assert any("gt_label" in note and "labels" in note for note in image_set(items).notes)
    assert not image_set([{"image": item["image"], "id": 3} for item in items]).notes


# folders that may be read in two ways


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        ("cat dog test", "has test, named like a split, beside cat, which has other images"),
        ("car plane train", "has train, named like a split, beside car"),
        ("cat dog test/cat", "has test, named like a split, beside cat"),
        ("val/cat valid/cat", "has two validation splits, val and valid"),
        ("blur/1/cat blur/2/cat fog/1/cat fog/2/cat", "Give the folder whose folders are the classes, e.g. .*/blur/1;"),
        ("1/cat 1/dog 2/cat 2/dog", "Give the folder whose folders are the classes, e.g. .*/1;"),
        ("images/cat images/dog", "Give the folder whose folders are the classes, e.g. .*/images;"),
        ("cat/images cat/masks dog/images dog/masks", "which of them are classes"),
    ],
)
def test_folders_that_may_be_classes_or_not_are_refused(tmp_path: Path, folders: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_data(write_tree(tmp_path, folders))


def test_folders_with_the_classes_of_a_split_are_not_classes(tmp_path: Path) -> None:
    splits = load_data(write_tree(tmp_path, "train/cat train/dog more/dog", 9))
    assert splits.class_names == ("cat", "dog") and any("'more' is neither" in note for note in splits.notes)


@pytest.mark.parametrize("folders", ["cat/a cat/b dog", "cat/images dog/images", "train/cat train/dog val/cat", "1 2"])
def test_other_folders_are_read(tmp_path: Path, folders: str) -> None:
    assert len(load_data(write_tree(tmp_path, folders, 6)).class_names) == 2
