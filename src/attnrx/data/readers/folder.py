"""A folder of images, one folder per class, with or without a folder per split above them."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from attnrx.data.holdout import held_out
from attnrx.data.readers.parquet import stamp
from attnrx.data.readers.reader import SPLITS, Opened, Reader, Records
from attnrx.errors import DataError
from attnrx.validation import require_regular

IMAGES = frozenset((".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".ppm", ".pgm", ".tif", ".tiff"))
SHARE = 0.1  # of the images of an unsplit folder, for each of validation and test

Listing = dict[str, dict[str, list[Path]]]  # split -> class -> files


class FileRecords(Records):
    """Image files with their labels."""

    def __init__(self, files: list[Path], labels: list[int], sources: list[int]):
        self.labels = torch.tensor(labels, dtype=torch.int64)
        self.sources = torch.tensor(sources, dtype=torch.int64)
        self._files = files

    def content(self, position: int) -> bytes:
        """Reads one file."""
        return require_regular(self._files[position], DataError).read_bytes()

    def where(self, position: int) -> str:
        """Returns the path of one file."""
        return str(self._files[position])


@dataclass(frozen=True)
class FolderReader(Reader):
    """`root/train/<class>/*.jpg` and its sibling splits, or `root/<class>/*.jpg`, which is then split by hash."""

    root: Path

    def identity(self) -> str:
        """Hashes the paths, sizes and times of all files."""
        every = (file for classes in self._listing.values() for files in classes.values() for file in files)
        return f"folder:{stamp(every)}"

    def open(self) -> Opened:
        """Lists the files; classes are the names of the folders, in alphabetical order."""
        listing = self._listing
        class_names = self._class_names(listing)
        if list(listing) == [""]:
            return self._open_unsplit(listing[""], class_names)
        splits = {name: _records(classes, class_names) for name, classes in listing.items()}
        return Opened(splits, class_names, self._notes())

    def _open_unsplit(self, classes: Mapping[str, list[Path]], class_names: tuple[str, ...]) -> Opened:
        """Holds out a tenth of each class for validation and for test, by the hash of the file's name.

        A file keeps its split when others are added, but for the few at the boundary.
        """
        small = [name for name, files in classes.items() if len(files) < 3]
        if small:
            raise DataError(
                f"{self.root} has no split folders, and class {small[0]!r} has {len(classes[small[0]])} images, too "
                "few to share between three splits; add some, or make folders train/, validation/ and test/."
            )
        whole = _records(classes, class_names)
        keys = [Path(whole.where(row)).relative_to(self.root).as_posix() for row in range(len(whole))]
        test = held_out(whole.labels, keys, SHARE, seed=0)
        rest = (~test).nonzero().flatten()
        validation = torch.zeros_like(test)
        validation[rest] = held_out(whole.labels[rest], [keys[row] for row in rest], SHARE / (1 - SHARE), seed=1)
        chosen = {"train": ~test & ~validation, "validation": validation, "test": test}
        splits = {name: _part(whole, mask.nonzero().flatten().tolist()) for name, mask in chosen.items()}
        note = "split by the hash of the file names: 80 % train, 10 % validation, 10 % test of each class"
        return Opened(splits, class_names, (*self._notes(), note))

    def _class_names(self, listing: Listing) -> tuple[str, ...]:
        if not any(listing.values()):
            raise DataError(
                f"{self.root} holds no images: expected {self.root}/train/<class>/*.jpg or {self.root}/<class>/*.jpg "
                f"with one of {', '.join(sorted(IMAGES))}."
            )
        names = listing.get("train") or listing.get("") or {}
        for split, classes in listing.items():
            strange = sorted(classes.keys() - names.keys())
            if names and strange:
                raise DataError(
                    f"label mismatch between the splits of {self.root}: {split}/ has the class folder {strange[0]!r}, "
                    "train/ has not; give every class a folder in train/."
                )
        return tuple(sorted(names or set[str]().union(*listing.values())))

    def _notes(self) -> tuple[str, ...]:
        other = self._walked[1]
        return (f"{other} files in the class folders are not images and were left out",) if other else ()

    @property
    def _listing(self) -> Listing:
        return self._walked[0]

    @cached_property
    def _walked(self) -> tuple[Listing, int]:
        folders = _folders(self.root)
        splits = {SPLITS[folder.name.lower()]: folder for folder in folders if folder.name.lower() in SPLITS}
        listing: Listing = {}
        other = 0
        for split, above in (splits or {"": self.root}).items():
            listing[split] = {}
            for folder in _folders(above):
                found = sorted(_files(folder))
                images = [file for file in found if file.suffix.lower() in IMAGES]
                other += len(found) - len(images)
                if images:
                    listing[split][folder.name] = images
        return listing, other


def _folders(above: Path) -> list[Path]:
    return sorted(_readable(entry) for entry in above.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _readable(path: Path) -> Path:
    """Refuses a name that is not UTF-8: it becomes the name of a class, or part of a fingerprint."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise DataError(f"the name {str(path)!r} is not UTF-8; rename it.") from error
    return path


def _files(folder: Path) -> Iterator[Path]:
    for above, _, names in os.walk(folder):
        yield from (_readable(Path(above, name)) for name in names if not name.startswith("."))


def _records(classes: Mapping[str, list[Path]], class_names: tuple[str, ...]) -> FileRecords:
    """Lists the files going round the classes, so that any prefix is nearly balanced."""
    number = {name: label for label, name in enumerate(class_names)}
    rounds = [(turn, number[name], file) for name, files in classes.items() for turn, file in enumerate(files)]
    rounds.sort(key=lambda item: item[:2])
    return FileRecords([item[2] for item in rounds], [item[1] for item in rounds], list(range(len(rounds))))


def _part(records: FileRecords, rows: list[int]) -> FileRecords:
    return FileRecords([Path(records.where(row)) for row in rows], records.labels[rows].tolist(), rows)
