"""Files that were not made by friends: nothing runs, nothing hangs, nothing is written outside, nothing is lost."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, Image

import attnrx as rx
from attnrx.data import load_data
from attnrx.support.errors import AttnrxError, DataError
from support import odd_pictures
from support.pictures import CLASSES, encoded, everything, read_all, rows, write_folder, write_parquet

EPS = b"""%!PS-Adobe-3.0 EPSF-3.0
%%BoundingBox: 0 0 20 20
%%EndComments
0 0 moveto 10 10 lineto stroke
showpage
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "attnrx"


@pytest.fixture
def no_ghostscript(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: Any, **__: Any) -> None:
        raise SystemError("Ghostscript was started")

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", started)


@pytest.mark.parametrize(
    "address", ["pipe:touch MARKER", "s3://MARKER/a.tar", "gs://MARKER/a.tar", "file://MARKER.tar"]
)
def test_no_address_starts_a_program(address: str, tmp_path: Path) -> None:
    marker = tmp_path / "started"
    with pytest.raises(DataError, match="there is nothing at"):
        load_data(address.replace("MARKER", str(marker)))
    assert not marker.exists()


# caches


def test_another_file_of_the_same_time_is_another_dataset(tmp_path: Path) -> None:
    path, kept = tmp_path / "pets.parquet", None
    for count, kind in ((30, "png"), (60, "png"), (60, "bmp")):
        write_parquet(path, rows(count, kind=kind) + rows(9, "test"))
        kept = kept or path.stat()
        os.utime(path, ns=(kept.st_atime_ns, kept.st_mtime_ns))
        splits = load_data(path)
        assert len(splits.train) + len(splits.validation) == count


def test_files_of_the_same_size_and_time_are_told_apart_by_their_content(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "pets", {"train": 4, "test": 2}, kind="bmp")
    file = root / "test" / "cat" / "000.png"
    before, content, status = everything(load_data(root), "test")[0], file.read_bytes(), file.stat()
    file.write_bytes(encoded(0, 77, kind="bmp"))
    assert file.stat().st_size == len(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert not torch.equal(everything(load_data(root), "test")[0], before)


# decoders


@pytest.mark.usefixtures("no_ghostscript")
@pytest.mark.parametrize("kind", ["folder", "parquet"])
def test_only_the_named_formats_are_decoded(kind: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no image of a known format") as refusal:
        if kind == "folder":
            root = write_folder(tmp_path / "pets", {"train": 4, "test": 2})
            (root / "train" / "cat" / "000.png").write_bytes(EPS)
            read_all(load_data(root))
        else:
            table = rows(12) + rows(6, "test")
            table[0]["image"] = {"bytes": EPS, "path": "a.png"}
            read_all(load_data(write_parquet(tmp_path / "pets.parquet", table)))
    assert "Ghostscript" not in str(refusal.value)


def bomb() -> bytes:
    return odd_pictures.saved(Image.new("1", (15_000, 15_000)), "png")


def test_a_picture_of_225_megapixels_is_refused_by_its_name(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "pets", {"train": 4, "test": 2})
    (root / "train" / "dog" / "001.png").write_bytes(bomb())
    with pytest.raises(DataError, match=r"dog/001\.png.*225000000 pixels"):
        read_all(load_data(root))


@pytest.mark.parametrize("name", ["x" * 300, f"{'x' * 300}.parquet", "a\0b", f"dir/{'y' * 5000}"])
@pytest.mark.parametrize("kind", [str, Path])
def test_names_that_no_file_can_have_are_refused(name: str, kind: Any) -> None:
    with pytest.raises(AttnrxError):
        load_data(kind(name))


# folders


def test_links_to_folders_around_them_are_not_followed(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "pets", {"train": 4, "test": 2})
    plain = {split: len(getattr(load_data(root), split)) for split in ("train", "test")}
    for name in CLASSES:
        for split in ("train", "test"):
            for number, target in enumerate((root, root / split, root / split / name, tmp_path, Path("/"))):
                (root / split / name / f"link{number}").symlink_to(target)
    found = load_data(root)
    assert {split: len(getattr(found, split)) for split in plain} == plain


def test_folders_that_link_to_each_other_are_read_once(tmp_path: Path) -> None:
    folder = tmp_path / "pets" / "train" / "cat"
    for number in range(9):
        (folder / f"part{number}").mkdir(parents=True)
        (folder / f"part{number}" / f"{number}.png").write_bytes(encoded(0, number))
    for number in range(9):
        for other in range(9):
            (folder / f"part{number}" / f"link{other}").symlink_to(folder / f"part{other}")
    (folder / "own.png").write_bytes(encoded(0, 9))
    splits = load_data(tmp_path / "pets")
    assert len(splits.train) + len(splits.validation) + len(splits.test) == 10


@pytest.mark.parametrize("splits", [("",), ("train", "test")])
def test_a_folder_without_folders_of_classes_has_images_without_labels(splits: tuple[str, ...], tmp_path: Path) -> None:
    for split in splits:
        (tmp_path / "flat" / split).mkdir(parents=True, exist_ok=True)
        for number in range(30):
            (tmp_path / "flat" / split / f"{number}.png").write_bytes(encoded(number % 3, number))
    loaded = load_data(tmp_path / "flat")
    parts = [getattr(loaded, split) for split in ("train", "validation", "test")]
    assert sum(map(len, parts)) == 30 * len(splits)
    assert not any(part.has_labels for part in parts)
    assert any("without labels" in note for note in loaded.notes)
    with pytest.raises(DataError, match="a folder of their own"):
        rx.data.require_labels(loaded.test)
    model = rx.models.build_model("svda:digits", channels=3, image_size=8, mean=(0.5,) * 3, std=(0.5,) * 3).float()
    assert rx.diagnose(model, rx.adapt_preprocessing(loaded, model).train).layers


def test_splits_with_and_without_folders_of_classes_are_refused(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "pets", {"train": 4})
    (root / "test").mkdir()
    (root / "test" / "a.png").write_bytes(odd_pictures.saved(Image.fromarray(np.zeros((8, 8), np.uint8)), "png"))
    with pytest.raises(DataError, match="none in test"):
        load_data(root)
