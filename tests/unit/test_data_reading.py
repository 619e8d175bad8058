"""From a name or a path to three splits: every storage format, and every way in which one can be wrong."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from attnrx.data import DATASETS, Columns, Splits, load_data
from attnrx.data import loading as loading_module
from attnrx.data.readers import parquet as parquet_module
from attnrx.errors import DataError, InvalidInput
from pictures import CLASSES, encoded, grey, rows, write_folder, write_parquet


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Decoded copies go to a folder of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("ATTNRX_DATA", raising=False)
    return tmp_path / "cache" / "attnrx"


def everything(splits: Splits, split: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pixels as 0..255, labels and source rows of a whole split."""
    batches = list(getattr(splits, split).batches(7))
    pixels = torch.cat([splits.normalization.invert(batch.images) for batch in batches]) * 255
    return pixels.round(), torch.cat([b.labels for b in batches]), torch.cat([b.index for b in batches])


def sizes(splits: Splits) -> tuple[int, int, int]:
    return len(splits.train), len(splits.validation), len(splits.test)


def assert_labels_belong(splits: Splits) -> None:
    """Every picture carries the label it was made with: red is 40 times the class."""
    for split in ("train", "validation", "test"):
        pixels, labels, _ = everything(splits, split)
        assert torch.equal(pixels[:, 0, 0, 0].long(), 40 * labels), split


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


def test_one_parquet_file_per_split_as_on_the_hub(tmp_path: Path) -> None:
    for name, count in (("train-00000-of-00002", 30), ("train-00001-of-00002", 12), ("val-0", 9), ("test", 6)):
        write_parquet(tmp_path / "data" / f"{name}.parquet", rows(count))
    for place in (tmp_path, str(tmp_path / "data" / "*.parquet")):
        splits = load_data(place)
        assert sizes(splits) == (42, 9, 6)
        assert_labels_belong(splits)
        assert splits.notes == ()


def test_other_column_names(tmp_path: Path) -> None:
    content = [{"img": row["image"], "fine_label": row["label"]} for row in rows(30)]
    path = write_parquet(tmp_path / "other.parquet", content, names=None)
    with pytest.raises(DataError, match=r"no image column 'image' \(it has img, fine_label\).*columns=Columns"):
        load_data(path)
    splits = load_data(path, columns=Columns(image="img", label="fine_label"))
    assert splits.class_names == ("0", "1", "2")
    assert_labels_belong(splits)
    named = path.rename(tmp_path / "cifar100.parquet")  # the catalogue knows these names
    assert load_data(named).image_size == 32


def test_words_as_labels(tmp_path: Path) -> None:
    content = [{"image": row["image"]["bytes"], "label": row["label_name"]} for row in rows(30)]
    splits = load_data(write_parquet(tmp_path / "words.parquet", content, names=None))
    assert splits.class_names == CLASSES
    assert_labels_belong(splits)


def test_names_beside_the_numbers(tmp_path: Path) -> None:
    assert load_data(write_parquet(tmp_path / "a.parquet", rows(30), names=None)).class_names == CLASSES


def test_large_parquet_is_mapped_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(tmp_path / "pets.parquet", rows(30) + rows(6, "test"))
    expected = load_data(path)
    monkeypatch.setattr(parquet_module, "READ_WHOLE", 0)
    monkeypatch.setattr(loading_module, "fetch", lambda _: None)
    mapped = load_data(path)
    assert mapped.train.fingerprint == expected.train.fingerprint
    assert mapped.class_names == expected.class_names


def test_a_folder_with_splits(tmp_path: Path) -> None:
    splits = load_data(write_folder(tmp_path / "pets", {"train": 10, "val": 2, "test": 3}))
    assert sizes(splits) == (30, 6, 9)
    assert splits.class_names == CLASSES
    assert_labels_belong(splits)


def test_a_folder_without_splits_is_split_by_the_names_of_the_files(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "pets", {"": 20})
    (root / "cat" / "notes.txt").write_text("not an image")
    splits = load_data(root)
    assert sizes(splits) == (48, 6, 6)
    assert_labels_belong(splits)
    assert any("1 files in the class folders are not images" in note for note in splits.notes)
    before = everything(splits, "test")[0]
    moved = root.rename(tmp_path / "elsewhere")
    assert torch.equal(everything(load_data(moved, seed=9), "test")[0], before)


def test_validation_becomes_the_test(tmp_path: Path) -> None:
    splits = load_data(write_folder(tmp_path / "pets", {"train": 10, "val": 2}))
    assert sizes(splits) == (27, 3, 6)
    assert any("validation images are used as the test" in note for note in splits.notes)


def test_digits_need_nothing() -> None:
    splits = load_data("digits", validation_share=0.2)
    assert (splits.channels, splits.image_size, len(splits.class_names)) == (1, 16, 10)
    assert sum(sizes(splits)) == 1797
    assert sizes(splits)[2] == 359
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


def test_decoded_copies_are_used_until_the_file_changes(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_parquet(tmp_path / "pets.parquet", rows(30))
    first = load_data(path)
    monkeypatch.setattr(parquet_module.ParquetReader, "open", lambda _: pytest.fail("opened although decoded"))
    second = load_data(path)
    assert second.train.fingerprint == first.train.fingerprint
    assert second.notes == first.notes
    assert second.class_names == first.class_names
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(own_cache.parent))
    write_parquet(path, rows(60))
    os.utime(path, ns=(1, 1))
    assert sizes(load_data(path)) == (42, 6, 12)
    for copy in (own_cache / "decoded").glob("*.safetensors"):
        copy.write_bytes(copy.read_bytes()[:-100])
    assert sizes(load_data(path)) == (42, 6, 12), "a damaged copy is made again"


def test_an_unwritable_cache_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert sizes(load_data(write_parquet(tmp_path / "pets.parquet", rows(30)))) == (21, 3, 6)


def test_a_known_name_is_found_in_the_folder_of_local_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(tmp_path / "cifar10.parquet", rows(30) + rows(6, "test"))
    monkeypatch.setenv("ATTNRX_DATA", str(tmp_path))
    splits = load_data("cifar10")
    assert (splits.name, splits.image_size) == ("cifar10", 32)
    assert any("cifar10.parquet" in note for note in splits.notes)


def test_a_hub_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    path = write_parquet(tmp_path / "pets.parquet", [{k: r[k] for k in ("image", "label")} for r in rows(30)])
    asked: list[Any] = []

    def from_hub(hub_id: str, **options: Any) -> datasets.DatasetDict:
        asked.append((hub_id, options))
        local = datasets.Dataset.from_parquet(str(path), cache_dir=str(tmp_path / "hub"))
        local = local.rename_columns({"image": "img", "label": "fine_label"})  # type: ignore[union-attr]
        return datasets.DatasetDict({"train": local, "test": local, "unlabelled": local})

    monkeypatch.setattr(datasets, "load_dataset", from_hub)
    splits = load_data("cifar100")
    assert asked == [("uoft-cs/cifar100", {"data_dir": None, "revision": None})]
    assert (splits.class_names, sizes(splits), splits.image_size) == (CLASSES, (27, 3, 30), 32)
    assert any("'unlabelled' is neither" in note for note in splits.notes)
    load_data("cifar100")
    assert len(asked) == 1, "the decoded copy needs no network"
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


# what can be wrong


def test_an_unknown_name_lists_the_nearest() -> None:
    with pytest.raises(DataError, match=r"unknown dataset 'fashion-mnist': did you mean 'fashion_mnist'"):
        load_data("fashion-mnist")
    with pytest.raises(DataError, match="there is nothing at"):
        load_data("data/nothing.parquet")
    with pytest.raises(DataError, match="there is nothing at"):
        load_data(Path("digits"))


def test_corrupt_images_are_named_or_skipped_and_counted(tmp_path: Path) -> None:
    content = rows(60)
    for row in (13, 25):
        content[row]["image"]["bytes"] = content[row]["image"]["bytes"][:40]
    path = write_parquet(tmp_path / "pets.parquet", content)
    with pytest.raises(DataError, match=r"pets.parquet, row 13 \(train/dog/0013.png\).*on_corrupt='skip'"):
        load_data(path)
    splits = load_data(path, on_corrupt="skip")
    assert sum(sizes(splits)) == 58
    assert any("2 corrupt images were skipped" in note and "row 13" in note for note in splits.notes)
    assert_labels_belong(splits)
    seen = torch.cat([everything(splits, split)[2] for split in ("train", "validation", "test")])
    assert set(range(60)) - set(seen.tolist()) == {13, 25}
    assert load_data(path, on_corrupt="skip").notes == splits.notes


def test_a_corrupt_file_of_a_folder_is_named(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "pets", {"train": 10, "test": 2})
    (root / "train" / "dog" / "004.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"train/dog/004.png"):
        load_data(root)


def test_a_row_is_named_within_its_file(tmp_path: Path) -> None:
    content = rows(30)
    content[4]["image"]["bytes"] = b"broken"
    write_parquet(tmp_path / "train-0.parquet", rows(30))
    write_parquet(tmp_path / "train-1.parquet", content)
    with pytest.raises(DataError, match=r"train-1.parquet, row 4 \("):
        load_data(tmp_path)


def test_a_missing_train_split(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no train split \(it has 'test'\)"):
        load_data(write_parquet(tmp_path / "pets.parquet", rows(30, "test")))
    with pytest.raises(DataError, match="no train split"):
        load_data(write_folder(tmp_path / "pets", {"val": 3, "test": 3}))


def test_label_mismatches(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a" / "train.parquet", rows(30))
    write_parquet(tmp_path / "a" / "test.parquet", rows(6), names=("dog", "cat", "eel"))
    with pytest.raises(DataError, match=r"label mismatch between.*name different classes"):
        load_data(tmp_path / "a")

    mixed = rows(30)
    mixed[7]["label_name"] = "eel"
    with pytest.raises(DataError, match=r"label mismatch.*label 1 is 'dog' in one place and 'eel' in another"):
        load_data(write_parquet(tmp_path / "b.parquet", mixed))

    with pytest.raises(DataError, match="class 'eel' occurs in test but never in train"):
        load_data(write_parquet(tmp_path / "c.parquet", [r for r in rows(30) if r["label"] < 2] + rows(6, "test")))

    root = write_folder(tmp_path / "d", {"train": 3, "test": 3})
    (root / "test" / "fox").mkdir()
    (root / "test" / "fox" / "0.png").write_bytes(encoded(0))
    with pytest.raises(DataError, match=r"test/ has the class folder 'fox'"):
        load_data(root)


def test_labels_that_cannot_be(tmp_path: Path) -> None:
    for label, reason in ((7, "label 7 .*outside the 3 classes"), (-1, "label -1 .*outside the 3 classes")):
        content = [{k: r[k] for k in ("image", "label")} for r in rows(30)]
        content[5]["label"] = label
        with pytest.raises(DataError, match=reason):
            load_data(write_parquet(tmp_path / f"label{label}.parquet", content))
    content = rows(30)
    content[5]["label"] = None
    with pytest.raises(DataError, match="1 rows without a label, the first is row 5"):
        load_data(write_parquet(tmp_path / "null.parquet", content))
    fractions = [{**row, "label": 0.5} for row in rows(30)]
    with pytest.raises(DataError, match="holds double, not class numbers"):
        load_data(write_parquet(tmp_path / "fraction.parquet", fractions))
    paths = [{**row, "image": "a.png"} for row in rows(30)]
    with pytest.raises(DataError, match="holds string, not encoded images"):
        load_data(write_parquet(tmp_path / "paths.parquet", paths))


def test_nothing_in_it(tmp_path: Path) -> None:
    (tmp_path / "hollow" / "train" / "cat").mkdir(parents=True)
    with pytest.raises(DataError, match="holds no images"):
        load_data(tmp_path / "hollow")
    empty = write_parquet(tmp_path / "empty.parquet", rows(30))
    import pyarrow.parquet as parquet

    parquet.write_table(parquet.read_table(empty).slice(0, 0).drop_columns(["split"]), empty)
    with pytest.raises(DataError, match=r"train split of .* is empty"):
        load_data(empty)
    with pytest.raises(DataError, match="class 'cat' has 2 images, too few"):
        load_data(write_folder(tmp_path / "few", {"": 2}))


def test_files_that_are_not_what_they_seem(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "pets.parquet", rows(30))
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(DataError, match="not a whole parquet file"):
        load_data(path)
    (tmp_path / "pets.csv").write_text("image,label")
    with pytest.raises(DataError, match="neither parquet"):
        load_data(tmp_path / "pets.csv")
    write_parquet(tmp_path / "m" / "train.parquet", rows(3))
    write_parquet(tmp_path / "m" / "more.parquet", rows(3))
    with pytest.raises(DataError, match=r"more.parquet belongs to no split"):
        load_data(tmp_path / "m")


def test_options_outside_their_range() -> None:
    for options in ({"image_size": 0}, {"validation_share": 0.0}, {"validation_share": 1.0}):
        with pytest.raises(InvalidInput, match=next(iter(options))):
            load_data("digits", **options)  # type: ignore[arg-type]


# the catalogue and the real files


def test_the_catalogue_is_complete() -> None:
    assert list(DATASETS) == [
        "digits",
        "fashion_mnist",
        "cifar10",
        "cifar100",
        "food101",
        "tiny_imagenet",
        "imagenette",
        "imagenet-1k",
    ]
    for name, card in DATASETS.items():
        assert len(card.normalization.mean) == card.geometry.channels, name
        assert (card.geometry.fit == "photo") == (card.augmentation.area is not None), name
        assert name == "digits" or card.hub_id, name
        assert json.loads(json.dumps(card.columns.__dict__))["label"], name


@pytest.mark.data
@pytest.mark.parametrize(
    ("file", "expected"), [("fashion_mnist", (54000, 6000, 10000, 1)), ("cifar10", (45000, 5000, 10000, 3))]
)
def test_the_real_files(real_data: Path, file: str, expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")  # decoding takes seconds: use the user's copy
    splits = load_data(real_data / f"{file}.parquet")
    assert (*sizes(splits), splits.channels) == expected
    assert next(splits.test.take(1000).batches(1000)).labels.bincount().tolist() == [100] * 10
    pixels = torch.cat([splits.normalization.invert(batch.images) for batch in splits.train.batches(5000)])
    if splits.name == "fashion_mnist":
        pixels = pixels[:, :, 2:-2, 2:-2]  # the published statistics are those without borders
    found = pixels.mean((0, 2, 3)), pixels.transpose(0, 1).flatten(1).std(1)
    for value, published in zip(found, (splits.normalization.mean, splits.normalization.std), strict=True):
        assert torch.allclose(value.double(), torch.tensor(published), atol=0.01)
