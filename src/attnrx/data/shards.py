"""WebDataset shards: local tar files of `<key>.jpg` with `<key>.cls`, whose images are read where they lie in the file.

The headers of a shard are read once. They give the place, the size and the label of every image, so that the images can
be read in any order, as those of parquet files and folders.
"""

import re
import tarfile
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, groupby
from pathlib import Path
from tarfile import EOFHeaderError, HeaderError, ReadError  # type: ignore[attr-defined, reportAttributeAccessIssue]
from typing import Any

import torch

from attnrx.data.files import IMAGES, group_by_split, stamp
from attnrx.data.splits import DatasetReader, Opened, StoredImages, numbered_classes
from attnrx.support.errors import CheckpointError, DataError
from attnrx.support.hardware import cache_folder
from attnrx.support.shapes import Int, Tensor
from attnrx.support.storage import read_tensors, write_tensors
from attnrx.support.validation import require_regular

CLASS_NAMES = "classnames.txt"  # in the folder of the shards: one class per line, in the order of the numbers
NAME = re.compile(r"((?:.*/|)[^./]+)\.([^/]*)")  # the key of a sample, and the ending of a member of it
HEADER = 512  # bytes, before the content of every member

Scan = dict[str, Int[Tensor, "images"]]
"""The first byte ("offsets"), the bytes ("sizes") and the class ("labels") of every image of a shard."""


@dataclass(frozen=True)
class ShardReader(DatasetReader):
    """Local tar files without compression, grouped into splits by their names."""

    root: Path
    files: tuple[Path, ...]

    @property
    def class_file(self) -> Path:
        """The file of the class names, which need not exist."""
        return (self.root if self.root.is_dir() else self.root.parent) / CLASS_NAMES

    def identity(self) -> str:
        return f"shards:{stamp([*self.files, *filter(Path.exists, [self.class_file])])}"

    def open(self) -> Opened:
        """Lists the images of all shards.

        Raises:
            DataError: A shard is damaged or holds no images, or a label is no class number.
        """
        groups = group_by_split(self.files, self.root)
        splits = {name or "train": _stored(files) for name, files in groups.items()}
        names = self._class_names()
        if names is None:
            highest = max(int(stored.labels.max()) for stored in splits.values())
            names = numbered_classes(highest, str(self.root))
        return Opened(splits, names)

    def _class_names(self) -> tuple[str, ...] | None:
        if not self.class_file.exists():
            return None
        try:
            lines = require_regular(self.class_file, DataError).read_text(encoding="utf-8").split("\n")
        except (OSError, ValueError) as error:
            raise DataError(f"{self.class_file} is not UTF-8 text ({error}); write one class name a line.") from error
        return tuple(lines if lines[-1] else lines[:-1])  # the last line may have no newline; an empty file no class


def _stored(files: tuple[Path, ...]) -> StoredImages:
    """Returns the images of some shards, one shard after the other."""
    scans = [_scan(file) for file in files]
    offsets, sizes, labels = (torch.cat([scan[name] for scan in scans]) for name in ("offsets", "sizes", "labels"))
    ends = list(accumulate(len(scan["labels"]) for scan in scans))

    def read(position: int, start: int, size: int) -> bytes:
        with require_regular(files[bisect_right(ends, position)], DataError).open("rb") as file:
            file.seek(start)
            return file.read(size)

    def content(position: int) -> bytes:
        return read(position, int(offsets[position]), int(sizes[position]))

    def where(position: int) -> str:
        name = f"at byte {offsets[position]}"
        with suppress(OSError, DataError, tarfile.TarError):
            header = read(position, int(offsets[position]) - HEADER, HEADER)
            name = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape").name.partition(".")[0]
        return f"{name} of the shard {files[bisect_right(ends, position)]}"

    return StoredImages(labels, torch.arange(len(labels)), content, where)


def _scan(file: Path) -> Scan:
    """Lists the images of a shard, without reading them; the list is kept in the user's cache folder."""
    # The stamp contains size, time and content of the file, so a changed shard is scanned again.
    cached = cache_folder() / "shards" / f"{stamp([file])[:24]}.safetensors"
    with suppress(CheckpointError):
        found = read_tensors(cached)
        if found.keys() == {"offsets", "sizes", "labels"} and len({each.shape for each in found.values()}) == 1:
            return found
    images = list(_images(file))
    if not images:
        raise DataError(f"the shard {file} holds no images; expected members <key>.jpg with <key>.cls.")
    offsets, sizes, labels = (torch.tensor(column) for column in zip(*images, strict=True))
    scan = {"offsets": offsets, "sizes": sizes, "labels": labels}
    with suppress(CheckpointError):  # the cache cannot be written: the next run scans again
        write_tensors(cached, scan)
    return scan


def _images(file: Path) -> Iterator[tuple[int, int, int]]:
    """Yields the first byte, the number of bytes and the label of every image of a shard, from its headers.

    A sample is the neighbouring members of one key, the name up to its first dot. Members that are no regular files,
    and metadata (names with __), are skipped.
    """
    number = 0
    require_regular(file, DataError)
    try:
        with tarfile.open(file, "r:", tarinfo=_Member) as archive:
            named = ((NAME.fullmatch(member.name), member) for member in archive if member.isreg())
            parts = ((name[1], name[2].lower(), member) for name, member in named if name and name[1][:2] != "__")
            for key, sample in groupby(parts, lambda part: part[0]):
                # The label is read at once, because the next member is elsewhere in the file.
                image, label = None, None
                for _, ending, member in sample:
                    if ending == "cls":
                        label = _label(archive, member)
                    elif f".{ending}" in IMAGES and image is None and not member.issparse():
                        image = member
                if image is None or label is None:
                    raise DataError(
                        f"sample {key} of the shard {file} has an image but no .cls label, or the reverse; write both "
                        "members of a sample one after the other."
                    )
                yield image.offset_data, image.size, label
                number += 1
    except (OSError, EOFError, tarfile.TarError) as error:
        reason = error.args[0] if error.args else error
        raise DataError(
            f"{file} is not a whole tar file: it cannot be read after image {number} ({reason}). Copy it again, "
            "without compression."
        ) from error


def _label(archive: tarfile.TarFile, member: tarfile.TarInfo) -> int:
    content: Any = archive.extractfile(member)
    text = content.read(40)
    try:
        label = int(text.decode())
    except ValueError:
        label = 2**63
    if not -(2**63) <= label < 2**63:
        raise DataError(f"{member.name} of the shard {archive.name} holds {text!r}; it must hold a class number.")
    return label


class _Member(tarfile.TarInfo):
    """A member of a whole archive: tarfile itself takes a missing end and damaged headers for the end."""

    @classmethod
    def fromtarfile(cls, tarfile: Any) -> "_Member":
        try:
            return super().fromtarfile(tarfile)
        except EOFHeaderError:  # the zeros that end an archive
            raise
        except HeaderError as error:
            raise ReadError(f"it breaks off, or is damaged, at byte {tarfile.offset}: {error}") from error
