"""WebDataset shards: tar files of `<key>.jpg` beside `<key>.cls`, read from front to back, local or remote."""

import tarfile
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, NoReturn

from attnrx.data.cache import cache_folder
from attnrx.data.decoding import decode
from attnrx.data.readers.folder import IMAGES
from attnrx.data.readers.parquet import split_in_path, stamp
from attnrx.data.readers.reader import MOST_CLASSES, numbered_classes
from attnrx.errors import CheckpointError, DataError
from attnrx.shapes import Tensor, UInt8
from attnrx.storage import read_json, write_json
from attnrx.validation import Integer, Items, Record, Text, require_regular, validated

INDEX = Record(
    {"shardlist": Items(Record({"url": Text(), "nsamples": Integer(1, 2**40)}, {"split": Text()}, open=True), 1)},
    {"class_names": Items(Text(), 1, MOST_CLASSES, unique=True)},
    open=True,
)
BROKEN = (OSError, EOFError, tarfile.TarError)
CLASS_NAMES = "classnames.txt"  # beside the shards: one class a line, in the order of the numbers


@dataclass(frozen=True)
class Shard:
    """One tar file: how many images it holds, which labels occur, and the row of its first image in the split.

    A part of one leaves out the first `skip` images, and those after its `count`.
    """

    url: str
    count: int
    labels: tuple[int, ...] = ()
    first: int = 0
    skip: int = 0


@dataclass(frozen=True)
class Sample:
    """One image of a shard before decoding."""

    key: str
    content: bytes
    label: int
    url: str

    def picture(self, channels: int | None) -> UInt8[Tensor, "channels height width"]:
        """Decodes the image, or raises a DataError that names it."""
        try:
            return decode(self.content, channels)
        except ValueError as error:
            raise DataError(f"cannot decode the image {self.key} of the shard {self.url}: {error}.") from error


@dataclass(frozen=True)
class OpenedShards:
    """The shards of every split, in order."""

    splits: Mapping[str, tuple[Shard, ...]]
    class_names: tuple[str, ...]


class ShardReader(ABC):
    """A way to learn which shards there are and how many images each holds."""

    @abstractmethod
    def open(self) -> OpenedShards:
        """Lists the shards, or raises a DataError that says what is wrong."""


@dataclass(frozen=True)
class TarReader(ShardReader):
    """Local tar files, whose headers are read once to count the images and see the labels."""

    root: Path
    groups: Mapping[str, tuple[Path, ...]]

    def open(self) -> OpenedShards:
        """Scans every shard that was not scanned before."""
        splits = {name or "train": _numbered([scan(file) for file in files]) for name, files in self.groups.items()}
        names = read_class_names(self.root if self.root.is_dir() else self.root.parent)
        if names is None:
            labels = {label for shards in splits.values() for shard in shards for label in shard.labels}
            names = numbered_classes(max(labels, default=0), str(self.root))
        return OpenedShards(splits, names)


@dataclass(frozen=True)
class IndexReader(ShardReader):
    """A JSON index of shards anywhere: `{"shardlist": [{"url", "nsamples"}], "class_names": [...]}`."""

    index: Path

    def open(self) -> OpenedShards:
        """Reads the index; the split of a shard is its `split`, or the one that its file or folder names."""
        groups: dict[str, list[Shard]] = defaultdict(list)
        try:
            index = validated(read_json(self.index), INDEX, self.index)
            for entry in index["shardlist"]:
                url = entry["url"]
                split = entry.get("split") or split_in_path("/".join(url.split("/")[-2:])) or "train"
                groups[split].append(Shard(url, entry["nsamples"]))
            names = index.get("class_names") or read_class_names(self.index.parent)
        except CheckpointError as error:
            raise DataError(
                f'{self.index} is not an index of shards ({error}); it must be JSON of the form {{"shardlist": '
                '[{"url": "train-000.tar", "nsamples": 1000}], "class_names": ["cat", "dog"]}.'
            ) from error
        if not names:
            raise DataError(
                f"{self.index} does not name the classes; add class_names to it, or put {CLASS_NAMES} beside it."
            )
        return OpenedShards({name: _numbered(shards) for name, shards in groups.items()}, tuple(names))


def read_class_names(folder: Path) -> tuple[str, ...] | None:
    """Reads the names of the classes, when there is a file of them."""
    path = folder / CLASS_NAMES
    if not path.exists():
        return None
    try:
        return tuple(require_regular(path, DataError).read_text(encoding="utf-8").split("\n")[:-1])
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not UTF-8 text ({error}); write one class name a line.") from error


def scan(file: Path) -> Shard:
    """Counts the images of a local shard and lists its labels, without reading the images."""
    known = cache_folder() / "shards" / f"{stamp([file])[:24]}.json"
    try:
        record = read_json(known)
        return Shard(str(file), record["count"], tuple(record["labels"]))
    except (CheckpointError, KeyError, TypeError):
        pass
    try:
        with tarfile.open(file, "r:") as tar:
            labels = [sample.label for sample in _samples(tar, str(file), images=False)]
    except BROKEN as error:
        raise DataError(f"{file} is not a whole tar file ({error}); copy it again.") from error
    if not labels:
        raise DataError(f"the shard {file} holds no images; expected members <key>.jpg beside <key>.cls.")
    shard = Shard(str(file), len(labels), tuple(sorted(set(labels))))
    with suppress(CheckpointError):  # no room for the note: the next run scans again
        write_json(known, {"shard": str(file), "count": shard.count, "labels": list(shard.labels)})
    return shard


def read(shard: Shard) -> Iterator[Sample]:
    """Reads a shard from front to back, up to its count."""
    number = 0
    try:
        stream = _open(shard.url)
        try:
            with tarfile.open(fileobj=stream, mode="r|") as tar:
                for sample in islice(_samples(tar, shard.url), shard.skip, shard.skip + shard.count):
                    yield sample
                    number += 1
        finally:
            with suppress(OSError):  # a download that is stopped early complains
                stream.close()
    except BROKEN as error:
        after = shard.skip + number
        raise DataError(f"cannot read the shard {shard.url} after image {after}: {error}. Copy it again.") from error
    if number < shard.count:
        held, promised = shard.skip + number, shard.skip + shard.count
        raise DataError(f"the shard {shard.url} holds {held} images, not {promised}; correct the index.")


def cut(shards: Sequence[Shard], rows: slice) -> list[Shard]:
    """Returns the shards that hold these rows of all, in the order given; the first and the last may be parts."""
    found, before = [], 0
    for shard in shards:
        low, high = (min(max(row - before, 0), shard.count) for row in (rows.start, rows.stop))
        if low < high:
            moved = {"first": shard.first + low, "skip": shard.skip + low, "count": high - low}
            found.append(replace(shard, **moved))
        before += shard.count
    return found


def _open(url: str) -> Any:
    """Opens a local path, or a url through `webdataset`, but no shell command: an index is data."""
    if "://" not in url and not url.startswith("pipe:"):
        return Path(url).open("rb")
    if url.startswith("pipe:"):
        raise DataError(f"the shard {url} is a shell command, which is not run; give a path or an https or gs url.")
    try:
        from webdataset.gopen import gopen
    except ImportError as error:
        raise DataError(
            f"the shard {url} is remote, which needs webdataset: pip install 'attnrx[webdataset]'."
        ) from error
    return gopen(url, "rb")


def _samples(tar: tarfile.TarFile, url: str, images: bool = True) -> Iterator[Sample]:
    """Pairs every image with the label beside it; the members of a sample follow one another."""
    current, content, label = "", None, None
    for member in tar:
        above, _, name = member.name.rpartition("/")
        key, _, ending = name.partition(".")
        is_image = f".{ending.lower()}" in IMAGES
        if not member.isfile() or not (is_image or ending == "cls"):
            continue
        if current and current != f"{above}/{key}":
            _incomplete(current, url)
        current = f"{above}/{key}"
        if is_image:
            content = _bytes(tar, member) if images else b""
        else:
            label = _label(_bytes(tar, member), key, url)
        if content is not None and label is not None:
            yield Sample(key, content, label, url)
            current, content, label = "", None, None
    if current:
        _incomplete(current, url)


def _incomplete(key: str, url: str) -> NoReturn:
    raise DataError(
        f"sample {key.lstrip('/')} of the shard {url} has an image but no .cls label, or the reverse; "
        "write both members of a sample one after the other."
    )


def _bytes(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    return file.read() if file is not None else b""


def _label(content: bytes, key: str, url: str) -> int:
    try:
        return int(content.decode())
    except ValueError:
        raise DataError(
            f"sample {key} of the shard {url} has the label {content[:40]!r}; {key}.cls must hold a class number."
        ) from None


def _numbered(shards: list[Shard]) -> tuple[Shard, ...]:
    firsts = accumulate((shard.count for shard in shards), initial=0)
    return tuple(
        Shard(shard.url, shard.count, shard.labels, first) for shard, first in zip(shards, firsts, strict=False)
    )
