"""What can be wrong with a dataset, and that the message says what was asked, what was found and what to do."""

import os
import tracemalloc
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

import attnrx as rx
from attnrx.data import ImageSet, load_data
from attnrx.data.splits import VALIDATION_IS_TEST
from attnrx.support.errors import DataError
from support.command_line import call, record
from support.pictures import CLASSES, encoded, read_all, rows, write_folder, write_parquet


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of tables go to a folder of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_an_unknown_name_lists_the_nearest() -> None:
    with pytest.raises(DataError, match=r"it is no name of a dataset: did you mean 'fashion_mnist'"):
        load_data("fashion-mist")
    with pytest.raises(DataError, match="there is nothing at"):
        load_data("data/nothing.parquet")
    with pytest.raises(DataError, match="there is nothing at"):
        load_data(Path("digits"))


def test_a_corrupt_file_of_a_folder_is_named(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "pets", {"train": 10, "test": 2})
    (root / "train" / "dog" / "004.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"train/dog/004.png"):
        read_all(load_data(root))


def test_a_row_is_named_within_its_split(tmp_path: Path) -> None:
    content = rows(30)
    content[4]["image"]["bytes"] = b"broken"
    write_parquet(tmp_path / "train-0.parquet", rows(30))
    write_parquet(tmp_path / "train-1.parquet", content)
    with pytest.raises(DataError, match=r"row 34 of split train of .* \(.*Repair or remove it"):
        read_all(load_data(tmp_path))


def test_data_without_a_train_split_have_the_other_splits(tmp_path: Path) -> None:
    only_test = load_data(write_parquet(tmp_path / "pets.parquet", rows(30, "test")))
    assert len(only_test.test) == 30 and only_test.class_names == CLASSES
    uses: list[Callable[[ImageSet], object]] = [
        len,
        lambda images: images.fingerprint,
        lambda images: images.take(1),
        lambda images: next(images.batches(1)),
    ]
    for use, name in product(uses, ("train", "validation")):
        with pytest.raises(DataError, match=rf"pets.parquet has no {name} images \(it has test\).*--split"):
            use(getattr(only_test, name))
    both = load_data(write_folder(tmp_path / "pets", {"val": 3, "test": 4}))
    assert (len(both.validation), len(both.test)) == (3 * len(CLASSES), 4 * len(CLASSES))
    one = load_data(write_folder(tmp_path / "val_pets", {"val": 3}))
    assert len(one.validation) == len(one.test) == 3 * len(CLASSES) and VALIDATION_IS_TEST in one.notes
    with pytest.raises(DataError, match="has no train, validation or test split"):
        load_data(write_parquet(tmp_path / "odd.parquet", rows(30, "extra")))


def test_commands_need_only_the_split_that_they_use(tmp_path: Path) -> None:
    vit = rx.models.build_model("svda:digits", channels=3, classes=len(CLASSES), image_size=8, patch_size=4)
    model = rx.save(vit.float(), tmp_path / "model")
    data = write_folder(tmp_path / "pets", {"test": 4})
    written = record("diagnose", model, "--data", data, "--split", "test", "--out", tmp_path / "d.json")
    assert written["images"] == 4 * len(CLASSES)
    done = call("diagnose", model, "--data", data, "--out", tmp_path / "e.json")
    assert done.code == 3 and "no validation images (it has test)" in done.err


def test_label_mismatches(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a" / "train.parquet", rows(30))
    write_parquet(tmp_path / "a" / "test.parquet", rows(6), names=("dog", "cat", "eel"))
    with pytest.raises(DataError, match=r"label mismatch between.*name different classes"):
        load_data(tmp_path / "a")

    with pytest.raises(DataError, match="class 'eel' occurs in test but never in train"):
        load_data(write_parquet(tmp_path / "c.parquet", [r for r in rows(30) if r["label"] < 2] + rows(6, "test")))

    root = write_folder(tmp_path / "d", {"train": 3, "test": 3})
    (root / "test" / "fox").mkdir()
    (root / "test" / "fox" / "0.png").write_bytes(encoded(0))
    with pytest.raises(DataError, match="class 'fox' occurs in test but never in train"):
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


@pytest.mark.parametrize("label", [10**7, 2**40])
def test_a_large_label_without_class_names_is_refused_before_names_are_made(tmp_path: Path, label: int) -> None:
    content = [{k: r[k] for k in ("image", "label")} for r in rows(30)]
    content[5]["label"] = label
    tracemalloc.start()
    with pytest.raises(DataError, match=f"the label {label} and no class names"):
        load_data(write_parquet(tmp_path / "large.parquet", content, names=None))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50e6


def test_a_pipe_among_the_images_is_refused_and_not_opened(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "pets", {"train": 10, "test": 2})
    os.mkfifo(root / "train" / "dog" / "pipe.png")
    with pytest.raises(DataError, match=r"train/dog/pipe.png is a pipe"):
        read_all(load_data(root))
    os.mkfifo(tmp_path / "pipe.parquet")
    with pytest.raises(DataError, match=r"pipe.parquet is a pipe"):
        load_data(tmp_path / "pipe.parquet")


def test_a_class_folder_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "pets", {"train": 10, "test": 2})
    (root / "train" / "dog").rename(root / "train" / "d\udcffg")
    with pytest.raises(DataError, match=r"is not UTF-8; rename it"):
        load_data(root)


def test_nothing_in_it(tmp_path: Path) -> None:
    (tmp_path / "hollow" / "train" / "cat").mkdir(parents=True)
    with pytest.raises(DataError, match="holds no images"):
        load_data(tmp_path / "hollow")
    empty = write_parquet(tmp_path / "empty.parquet", rows(30))
    import pyarrow.parquet as parquet

    parquet.write_table(parquet.read_table(empty).slice(0, 0).drop_columns(["split"]), empty)
    with pytest.raises(DataError, match=r"train split of .* is empty"):
        load_data(empty)
    with pytest.raises(DataError, match="no class of train has two images"):
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
