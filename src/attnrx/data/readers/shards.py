"""WebDataset shards: tar files of `<key>.jpg` beside `<key>.cls`, read from front to back, local or remote."""

import tarfile
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from attnrx.data.cache import cache_folder
from attnrx.data.decoding import decode
from attnrx.data.readers.folder import IMAGES
from attnrx.data.readers.parquet import split_in_path, stamp
from attnrx.errors import CheckpointError, DataError
from attnrx.shapes import Tensor, UInt8
from attnrx.storage import read_json, write_json

CLASS_NAMES = "classnames.txt"  # beside the shards: one class a line, in the order of the numbers


@dataclass(frozen=True)
class Shard:
    """One tar file: how many images it holds, which labels occur, and the row of its first image in the split."""

    url: str
    count: int
    labels: tuple[int, ...] = ()
    first: int = 0


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
            names = tuple(str(label) for label in range(max(labels, default=0) + 1))
        return OpenedShards(splits, names)


@dataclass(frozen=True)
class IndexReader(ShardReader):
    """A JSON index of shards anywhere: `{"shardlist": [{"url", "nsamples"}], "class_names": [...]}`."""

    index: Path

    def open(self) -> OpenedShards:
        """Reads the index; the split of a shard is the one its url names."""
        groups: dict[str, list[Shard]] = defaultdict(list)
        try:
            index = read_json(self.index)
            for entry in index["shardlist"]:
                groups[split_in_path(entry["url"]) or "train"].append(Shard(str(entry["url"]), int(entry["nsamples"])))
            names = index.get("class_names") or read_class_names(self.index.parent)
        except (CheckpointError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(
                f'{self.index} is not an index of shards ({error}); it must be JSON of the form {{"shardlist": '
                '[{"url": "train-000.tar", "nsamples": 1000}], "class_names": ["cat", "dog"]}.'
            ) from error
        if not names:
            raise DataError(
                f"{self.index} does not name the classes; add class_names to it, or put {CLASS_NAMES} beside it."
            )
        return OpenedShards({name: _numbered(shards) for name, shards in groups.items()}, tuple(map(str, names)))


def read_class_names(folder: Path) -> tuple[str, ...] | None:
    """Reads the names of the classes, when there is a file of them."""
    path = folder / CLASS_NAMES
    return tuple(path.read_text(encoding="utf-8").split("\n")[:-1]) if path.exists() else None


def scan(file: Path) -> Shard:
    """Counts the images of a local shard and lists its labels, from the headers and the small label members alone."""
    known = cache_folder() / "shards" / f"{stamp([file])[:24]}.json"
    try:
        record = read_json(known)
        return Shard(str(file), record["count"], tuple(record["labels"]))
    except (CheckpointError, KeyError, TypeError):
        count, labels = _scan(file)
    if not count:
        raise DataError(f"the shard {file} holds no images; expected members <key>.jpg beside <key>.cls.")
    try:
        write_json(known, {"shard": str(file), "count": count, "labels": list(labels)})
    except CheckpointError:  # no room for the note: the next run scans again
        pass
    return Shard(str(file), count, labels)


def read(shard: Shard) -> Iterator[Sample]:
    """Reads a shard from front to back; needs the `webdataset` extra."""
    try:
        from webdataset.pipeline import DataPipeline
        from webdataset.shardlists import SimpleShardList
        from webdataset.tariterators import tarfile_to_samples
    except ImportError as error:
        raise DataError("reading tar shards needs webdataset: pip install 'attnrx[webdataset]'.") from error

    number = 0
    pipeline = DataPipeline(SimpleShardList([shard.url]), tarfile_to_samples())
    try:
        for number, sample in enumerate(pipeline):
            if number == shard.count:
                return
            yield _sample(sample, shard)
    except (OSError, EOFError, tarfile.TarError, ValueError) as error:
        raise DataError(f"cannot read the shard {shard.url} after image {number}: {error}. Copy it again.") from error


def _sample(found: Mapping[str, object], shard: Shard) -> Sample:
    key = str(found["__key__"])
    content = next((value for name, value in found.items() if f".{name}" in IMAGES), None)
    if not isinstance(content, bytes):
        raise DataError(f"sample {key} of the shard {shard.url} has no image ({', '.join(found)}).")
    return Sample(key, content, _label(found.get("cls"), key, shard.url), shard.url)


def _label(content: object, key: str, url: str) -> int:
    try:
        return int(content.decode()) if isinstance(content, bytes) else int(str(content))
    except ValueError:
        raise DataError(
            f"sample {key} of the shard {url} has the label {content!r}; its member {key}.cls must hold a class number."
        ) from None


def _scan(file: Path) -> tuple[int, tuple[int, ...]]:
    images: set[str] = set()
    labels: dict[str, int] = {}
    try:
        with tarfile.open(file, "r:") as tar:
            for member in tar:
                above, _, name = member.name.rpartition("/")
                key, _, ending = name.partition(".")
                if member.isfile() and f".{ending.lower()}" in IMAGES:
                    images.add(f"{above}/{key}")
                elif member.isfile() and ending == "cls":
                    content = tar.extractfile(member)
                    labels[f"{above}/{key}"] = _label(content.read() if content else None, key, str(file))
    except (tarfile.TarError, OSError, EOFError) as error:
        raise DataError(f"{file} is not a whole tar file ({error}); copy it again.") from error
    alone = sorted(images ^ labels.keys())
    if alone:
        raise DataError(
            f"sample {alone[0].lstrip('/')} of the shard {file} has an image but no .cls label, or the reverse; "
            f"{len(alone)} samples are like that. Write both members for every sample."
        )
    return len(images), tuple(sorted(set(labels.values())))


def _numbered(shards: list[Shard]) -> tuple[Shard, ...]:
    firsts = accumulate((shard.count for shard in shards), initial=0)
    return tuple(
        Shard(shard.url, shard.count, shard.labels, first) for shard, first in zip(shards, firsts, strict=False)
    )
