"""Folders of images, one folder per class, with or without a folder per split above, listed by torchvision."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attnrx.data.files import IMAGES, stamp
from attnrx.data.holdout import held_out
from attnrx.data.stored import SPLITS, DatasetReader, Opened, StoredImages
from attnrx.errors import DataError
from attnrx.optional import required_module
from attnrx.serialization.validation import require_regular

SHARE = 0.1  # of the images of an unsplit folder, for each of validation and test


class FileImages(StoredImages):
    """Image files with their labels."""

    def __init__(self, files: list[Path], labels: list[int], sources: list[int]):
        self.labels = torch.tensor(labels, dtype=torch.int64)
        self.sources = torch.tensor(sources, dtype=torch.int64)
        self.files = files

    def content(self, position: int) -> bytes:
        return require_regular(self.files[position], DataError).read_bytes()

    def where(self, position: int) -> str:
        return str(self.files[position])

    def rows(self, rows: list[int]) -> "FileImages":
        """Returns some of the images, which keep their row as `sources`."""
        return FileImages([self.files[row] for row in rows], self.labels[rows].tolist(), rows)


@dataclass(frozen=True)
class FolderReader(DatasetReader):
    """`root/train/<class>/*.jpg` and other splits beside it, or `root/<class>/*.jpg`, split by a hash of the names."""

    root: Path

    def identity(self) -> str:
        files = (Path(file) for folder in self._folders().values() for file, _ in folder.samples)
        return f"folder:{stamp(files)}"

    def open(self) -> Opened:
        """Lists the files. Classes are the folders that hold images, in alphabetical order."""
        folders = self._folders()
        classes = {name: _classes_with_images(folder) for name, folder in folders.items()}
        if not any(classes.values()):
            raise DataError(
                f"{self.root} holds no images: expected {self.root}/train/<class>/*.jpg or {self.root}/<class>/*.jpg "
                f"with one of {', '.join(sorted(IMAGES))}."
            )
        names = classes.get("train") or classes.get("") or set[str]().union(*classes.values())
        for split, own in classes.items():
            if own - names:
                raise DataError(
                    f"label mismatch between the splits of {self.root}: {split}/ has the class folder "
                    f"{min(own - names)!r}, train/ has not; give every class a folder in train/."
                )
        class_names = tuple(sorted(names))
        splits = {name: _interleaved(folder, class_names) for name, folder in folders.items()}
        if list(splits) == [""]:
            return self._split_by_hash(splits[""], class_names)
        return Opened(splits, class_names)

    def _folders(self) -> dict[str, Any]:
        """Lists the images of every split with torchvision; the split "" is a folder without split folders."""
        below = [entry for entry in sorted(self.root.iterdir()) if entry.is_dir() and not entry.name.startswith(".")]
        splits = {SPLITS[entry.name.lower()]: entry for entry in below if entry.name.lower() in SPLITS}
        return {name: _image_folder(folder) for name, folder in (splits or {"": self.root}).items()}

    def _split_by_hash(self, whole: FileImages, class_names: tuple[str, ...]) -> Opened:
        """Holds out a tenth of each class for validation and for test, by the hash of the file's name.

        A file keeps its split when others are added, except for a few at the boundary.
        """
        counts = whole.labels.bincount()
        if int(counts.min()) < 3:
            few = int(counts.argmin())
            raise DataError(
                f"{self.root} has no split folders, and class {class_names[few]!r} has {int(counts[few])} images, too "
                "few to share between three splits; add some, or make folders train/, validation/ and test/."
            )
        keys = [file.relative_to(self.root).as_posix() for file in whole.files]
        test = held_out(whole.labels, keys, SHARE, seed=0)
        rest = (~test).nonzero().flatten()
        validation = torch.zeros_like(test)
        validation[rest] = held_out(whole.labels[rest], [keys[row] for row in rest], SHARE / (1 - SHARE), seed=1)
        masks = {"train": ~test & ~validation, "validation": validation, "test": test}
        splits = {name: whole.rows(mask.nonzero().flatten().tolist()) for name, mask in masks.items()}
        note = "split by the hash of the file names: 80 % train, 10 % validation, 10 % test of each class"
        return Opened(splits, class_names, (note,))


def _image_folder(folder: Path) -> Any:
    torchvision = required_module("torchvision.datasets", "data", "reading a folder of images")
    try:
        return torchvision.ImageFolder(folder, is_valid_file=_is_image, allow_empty=True)
    except FileNotFoundError as error:
        raise DataError(f"{folder} holds no folder per class ({error}); expected {folder}/<class>/*.jpg.") from error


def _is_image(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError as error:  # the name becomes the name of a class, or part of a fingerprint
        raise DataError(f"the name {path!r} is not UTF-8; rename it.") from error
    file = Path(path)
    return file.suffix.lower() in IMAGES and not file.name.startswith(".")


def _classes_with_images(folder: Any) -> set[str]:
    return {folder.classes[label] for label in set(folder.targets) if not folder.classes[label].startswith(".")}


def _interleaved(folder: Any, class_names: tuple[str, ...]) -> FileImages:
    """Lists the files going round the classes, so that any prefix is nearly balanced."""
    number = {name: label for label, name in enumerate(class_names)}
    turns: dict[str, int] = {}
    rounds = []
    for file, target in folder.samples:
        name = folder.classes[target]
        if name in number:
            turns[name] = turn = turns.get(name, -1) + 1
            rounds.append((turn, number[name], Path(file)))
    rounds.sort(key=lambda item: item[:2])
    return FileImages([item[2] for item in rounds], [item[1] for item in rounds], list(range(len(rounds))))
