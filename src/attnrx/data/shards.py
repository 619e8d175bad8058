"""WebDataset shards: tar files of `<key>.jpg` with `<key>.cls`, read from front to back, local or remote.

Each process reads shards of its own from front to back, the first and the last of them perhaps in part: of the images
of a pass, every one is read by one process, once. Unlike for other splits, N processes read them in another order than
one; resuming at a step reads, without decoding, the samples before it.
"""

import os
import re
import tarfile
import urllib.parse
import urllib.request
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from http.client import HTTPException
from itertools import accumulate, chain, islice
from pathlib import Path
from tarfile import EOFHeaderError, HeaderError, ReadError  # type: ignore[attr-defined, reportAttributeAccessIssue]
from typing import Any

import torch

from attnrx.data.files import IMAGES, split_in_path, stamp
from attnrx.data.images import ORDER, Batch, ImageSet, Pass, digest, generator, require_count, rows_of_part
from attnrx.data.loaded_images import Stream, Work
from attnrx.data.pixels import decode
from attnrx.data.splits import MAX_CLASSES, check_trained, numbered_classes, use_validation_as_test_
from attnrx.support.errors import CheckpointError, DataError
from attnrx.support.hardware import cache_folder
from attnrx.support.optional import required_module
from attnrx.support.preprocessing import ImageGeometry, Normalization
from attnrx.support.shapes import Tensor, UInt8
from attnrx.support.storage import read_json, write_json
from attnrx.support.validation import Integer, Items, Record, Text, require_regular, validated

# The index of the library webdataset (wids), which has more fields, and in addition the names of the classes.
INDEX = Record(
    {"shardlist": Items(Record({"url": Text(), "nsamples": Integer(1, 2**40)}, {"split": Text()}, open=True), 1)},
    {"class_names": Items(Text(), 1, MAX_CLASSES, unique=True)},
    open=True,
)
CLASS_NAMES = "classnames.txt"  # in the folder of the shards: one class per line, in the order of the numbers
SCHEMES = ("file", "http", "https")  # of the addresses in an index, beside paths
TIMEOUT = 60  # seconds without an answer of a server
WINDOW = 2048  # encoded images that are shuffled together, after the order of the shards


@dataclass(frozen=True)
class Shard:
    """One tar file: how many images it holds, which labels occur, and the row of its first image in the split.

    A part starts after the first `skip` images and has `count` images.
    """

    url: str
    count: int
    labels: tuple[int, ...] = ()
    first: int = 0
    skip: int = 0


@dataclass(frozen=True)
class Sample:
    """One image of a shard before decoding, and its row in the split."""

    row: int
    key: str
    content: bytes
    label: int
    url: str

    def picture(self, channels: int | None, alpha: str = "drop") -> UInt8[Tensor, "channels height width"]:
        """Decodes the image.

        Raises:
            DataError: It cannot be decoded; the message names it.
        """
        try:
            return decode(self.content, channels, alpha)
        except ValueError as error:
            raise DataError(f"cannot decode the image {self.key} of the shard {self.url}: {error}.") from error


@dataclass(frozen=True)
class OpenedShards:
    """The shards of every split, in order."""

    splits: Mapping[str, tuple[Shard, ...]]
    class_names: tuple[str, ...]


def open_tars(root: Path, groups: Mapping[str, tuple[Path, ...]]) -> OpenedShards:
    """Lists local tar files, whose headers are read once to count the images and see the labels.

    Raises:
        DataError: A shard is damaged, holds no images, or a label is no class number.
        NotSupported: webdataset is not installed.
    """
    splits = {name or "train": _numbered([_scan(file) for file in files]) for name, files in groups.items()}
    names = _class_names(root if root.is_dir() else root.parent)
    if names is None:
        labels = {label for shards in splits.values() for shard in shards for label in shard.labels}
        names = numbered_classes(max(labels, default=0), str(root))
    return OpenedShards(splits, names)


def open_index(index: Path) -> OpenedShards:
    """Lists the shards of a JSON index, which may be anywhere: `{"shardlist": [{"url", "nsamples"}], "class_names"}`.

    The split of a shard is its `split`, or the one that its file or folder names.

    Raises:
        DataError: The index is damaged, names no classes, or an address with another scheme than SCHEMES.
    """
    groups: dict[str, list[Shard]] = defaultdict(list)
    try:
        record = validated(read_json(index), INDEX, index)
    except CheckpointError as error:
        raise DataError(
            f'{index} is not an index of shards ({error}); it must be JSON of the form {{"shardlist": '
            '[{"url": "train-000.tar", "nsamples": 1000}], "class_names": ["cat", "dog"]}.'
        ) from error
    for entry in record["shardlist"]:
        url = entry["url"]
        require_scheme(url)  # of all shards, before one is opened
        # The file and its folder only: further parts of a url are not about the split.
        split = entry.get("split") or split_in_path("/".join(url.split("/")[-2:])) or "train"
        groups[split].append(Shard(url, entry["nsamples"]))
    names = record.get("class_names") or _class_names(index.parent)
    if not names:
        raise DataError(
            f"{index} does not name the classes; add class_names to it, or a file {CLASS_NAMES} to its folder."
        )
    return OpenedShards({name: _numbered(shards) for name, shards in groups.items()}, tuple(names))


def _class_names(folder: Path) -> tuple[str, ...] | None:
    path = folder / CLASS_NAMES
    if not path.exists():
        return None
    try:
        lines = require_regular(path, DataError).read_text(encoding="utf-8").split("\n")
        return tuple(lines if lines[-1] else lines[:-1])  # the last line may have no newline; an empty file no class
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not UTF-8 text ({error}); write one class name a line.") from error


def _scan(file: Path) -> Shard:
    """Counts the images of a local shard and lists its labels, without reading the images."""
    # The stamp contains size and time of the file, so a changed shard is scanned again.
    cached = cache_folder() / "shards" / f"{stamp([file])[:24]}.json"
    try:
        record = read_json(cached)
        return Shard(str(file), record["count"], tuple(record["labels"]))
    except (CheckpointError, KeyError, TypeError):
        pass
    labels = [
        # The other members are skipped, so that no image is read.
        _label(sample, str(file))
        for sample in _samples(str(file), lambda name: name.endswith(".cls"))
    ]
    if not labels:
        raise DataError(f"the shard {file} holds no images; expected members <key>.jpg with <key>.cls.")
    shard = Shard(str(file), len(labels), tuple(sorted(set(labels))))
    with suppress(CheckpointError):  # the cache cannot be written: the next run scans again
        write_json(cached, {"shard": str(file), "count": shard.count, "labels": list(shard.labels)})
    return shard


def read_shard(shard: Shard) -> Iterator[Sample]:
    """Reads a shard from front to back, up to its count.

    Raises:
        DataError: The shard is damaged, or holds fewer images than stated.
        NotSupported: webdataset is not installed.
    """
    row = shard.first
    for sample in islice(_samples(shard.url), shard.skip, shard.skip + shard.count):
        content = next((value for ending, value in sample.items() if f".{ending}" in IMAGES), None)
        if content is None:
            raise DataError(_incomplete(sample, shard.url))
        yield Sample(row, sample["__key__"], content, _label(sample, shard.url), shard.url)
        row += 1
    # Otherwise this process would have fewer steps than the others, which would wait for it.
    missing = shard.first + shard.count - row
    if missing:
        promised = shard.skip + shard.count
        raise DataError(f"the shard {shard.url} holds {promised - missing} images, not {promised}; correct the index.")


def _cut(shards: Sequence[Shard], rows: slice) -> list[Shard]:
    """Returns the shards that hold these rows of all, in the order given; the first and the last may be parts."""
    parts, offset = [], 0
    for shard in shards:
        low, high = (min(max(row - offset, 0), shard.count) for row in (rows.start, rows.stop))
        if low < high:
            parts.append(Shard(shard.url, high - low, shard.labels, shard.first + low, shard.skip + low))
        offset += shard.count
    return parts


def _samples(url: str, select: Callable[[str], bool] = lambda name: True) -> Iterator[dict[str, Any]]:
    """Reads the samples of a shard, of the members that `select` takes by their names.

    Members that are no regular files are skipped, and nothing is written to a disk.
    """
    reading = required_module("webdataset.tariterators", "webdataset", "reading tar shards")
    number = 0
    try:
        with _stream(url) as stream:
            # webdataset groups neighbouring members by their key, the name up to its first dot.
            for sample in reading.group_by_keys(_members(stream, url, select)):
                yield sample
                number += 1
    # HTTPException: of a connection that breaks off.
    except (OSError, EOFError, ValueError, zlib.error, tarfile.TarError, HTTPException) as error:
        reason = error.args[0] if error.args else error
        raise DataError(
            f"{url} is not a whole tar file: it cannot be read after image {number} ({reason}). Copy it again."
        ) from error


def _stream(url: str) -> Any:
    # Not webdataset's own opener, which starts programs for most schemes, curl for https among them.
    require_scheme(url)
    scheme = urllib.parse.urlsplit(url).scheme.lower()
    if scheme in ("http", "https"):
        return urllib.request.urlopen(url, timeout=TIMEOUT)
    path = urllib.request.url2pathname(urllib.parse.urlsplit(url).path) if scheme == "file" else url
    return require_regular(path, DataError).open("rb")


def require_scheme(url: str) -> None:
    """Checks that the address of a shard is a path, or of one of SCHEMES.

    Raises:
        DataError: It has another scheme, which could start a program.
    """
    # Of one letter is a drive of Windows.
    found = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):", url)
    if found is not None and found[1].lower() not in SCHEMES and not os.path.isfile(url):  # noqa: PTH113, Path.is_file raises
        raise DataError(
            f"the shard {url[:200]} has the scheme {found[1]}:, which is not read: it could start a program. Give a "
            f"path, or an address with one of {', '.join(SCHEMES)}."
        )


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


def _members(stream: Any, url: str, select: Callable[[str], bool]) -> Iterator[dict[str, Any]]:
    """Yields the selected files of an archive, read from front to back, as `group_by_keys` of webdataset takes them."""
    with tarfile.open(fileobj=stream, mode="r|*", tarinfo=_Member) as archive:
        for member in archive:
            # Names with __ are metadata of webdataset.
            if member.isreg() and not re.match(r"__[^/]*__($|/)", member.name) and select(member.name):
                content: Any = archive.extractfile(member)
                yield {"fname": member.name, "data": content.read(), "__url__": url}
            archive.members = []  # type: ignore[reportAttributeAccessIssue]  # else they are kept
    yield {}  # the last sample is complete


def _label(sample: dict[str, Any], url: str) -> int:
    if "cls" not in sample:
        raise DataError(_incomplete(sample, url))
    try:
        return int(sample["cls"].decode())
    except ValueError:
        raise DataError(
            f"sample {sample['__key__']} of the shard {url} has the label {sample['cls'][:40]!r}; "
            f"{sample['__key__']}.cls must hold a class number."
        ) from None


def _incomplete(sample: dict[str, Any], url: str) -> str:
    return (
        f"sample {sample['__key__']} of the shard {url} has an image but no .cls label, or the reverse; "
        "write both members of a sample one after the other."
    )


def _numbered(shards: list[Shard]) -> tuple[Shard, ...]:
    firsts = accumulate((shard.count for shard in shards), initial=0)
    return tuple(replace(shard, first=first) for shard, first in zip(shards, firsts, strict=False))


@dataclass(frozen=True, eq=False)
class ShardImages(ImageSet):
    """The images of some shards, in storage order, or shuffled by shard and within a window."""

    name: str
    shards: tuple[Shard, ...]
    stream: Stream

    def __len__(self) -> int:
        return sum(shard.count for shard in self.shards)

    @property
    def skipped(self) -> tuple[str, ...]:
        """Messages of the images that could not be decoded so far."""
        return tuple(self.stream.corrupt.found)

    @property
    def fingerprint(self) -> str:
        """Hashes the counts and names of the shards and the labels that occur in each."""
        names = (f"{shard.url.rpartition('/')[2]}{shard.count}{shard.labels}".encode() for shard in self.shards)
        return digest(self.name, torch.tensor([shard.count for shard in self.shards]), names)

    def take(self, count: int) -> "ImageSet":
        """Returns the first `count` images as they are stored; their classes are not known beforehand."""
        require_count(count, len(self))
        return replace(self, shards=tuple(_cut(self.shards, slice(0, count))))

    def part(self, process: int, processes: int, batch_size: int) -> "ImageSet":
        return replace(self, shards=tuple(_cut(self.shards, rows_of_part(len(self), process, processes, batch_size))))

    def renormalized(self, normalization: Normalization) -> "ImageSet":
        return replace(self, stream=replace(self.stream, normalization=normalization))

    def with_geometry(self, geometry: ImageGeometry) -> "ImageSet":
        return replace(self, stream=replace(self.stream, geometry=geometry))

    def _pass(self, order: Pass) -> Iterator[Batch]:
        return self.stream.batches(self._works(order, self._own(order)), order)

    def _own(self, order: Pass) -> list[Shard]:
        """Cuts what this process reads out of all shards, which a shuffled pass puts into another order first."""
        process, processes = order.shard
        if order.seed is None:
            count = len(self)
            return _cut(self.shards, slice(count * process // processes, count * (process + 1) // processes))
        shards = torch.randperm(len(self.shards), generator=generator(order.seed, ORDER)).tolist()
        # As many images for every process: the rest of the last step is dropped.
        share = order.length(len(self)) * order.local_size
        return _cut([self.shards[number] for number in shards], slice(share * process, share * (process + 1)))

    def _works(self, order: Pass, own: list[Shard]) -> Iterator[Work]:
        """Cuts the samples of this process into batches; a shuffled pass has as many steps in every process."""
        order.length(len(self))  # refuses a pass without steps, and a start after its end
        size, process = order.local_size, order.shard[0]
        samples = chain.from_iterable(map(read_shard, own))
        if order.seed is not None:
            samples = _shuffled(samples, order.seed, process)
        # After shuffling, because the samples of the first steps are part of the windows that are shuffled.
        samples = islice(samples, order.start * size, None)
        number = order.start
        while batch := list(islice(samples, size)):
            # Random numbers as of other splits: drawn for all processes, of which each takes its part.
            share = slice(process * size, process * size + len(batch))
            geometry = self.stream.geometry
            pictures = [partial(sample.picture, geometry.channels, geometry.alpha) for sample in batch]
            labels = torch.tensor([sample.label for sample in batch])
            index = torch.tensor([sample.row for sample in batch])
            yield Work(pictures, labels, index, order.draws(number, order.batch_size, share))
            number += 1


def _shuffled(samples: Iterator[Sample], seed: int, process: int) -> Iterator[Sample]:
    window = 0
    while buffer := list(islice(samples, WINDOW)):
        # Process and window are part of the seed: the order does not depend on numbers that were drawn before.
        for position in torch.randperm(len(buffer), generator=generator(seed, ORDER, 1 + process, window)).tolist():
            yield buffer[position]
        window += 1


def assign_shards(opened: OpenedShards, source: str) -> tuple[dict[str, tuple[Shard, ...]], tuple[str, ...]]:
    """Assigns the shards to train, validation and test; a missing split is the last tenth of train's shards.

    Raises:
        DataError: There are too few shards to hold some out, or labels outside the classes.
    """
    splits = dict(opened.splits)
    notes = use_validation_as_test_(splits)
    # Whole shards, because which images a shard holds is known only after reading it.
    for split in ("test", "validation"):
        if split in splits or "train" not in splits:
            continue
        train = splits["train"]
        num_held_out = -(-len(train) // 10)
        if num_held_out >= len(train):
            raise DataError(
                f"{source} has no {split} shards, and too few train shards to hold one out; write more, smaller ones."
            )
        splits["train"], held_out = train[:-num_held_out], train[-num_held_out:]
        # Rows are counted from the beginning of the new split.
        splits[split] = tuple(replace(shard, first=shard.first - held_out[0].first) for shard in held_out)
        notes.append(f"no {split} split: the last {num_held_out} of {len(train)} train shards are held out")
    _check_labels(splits, opened.class_names, source)
    return splits, tuple(notes)


def _check_labels(splits: dict[str, tuple[Shard, ...]], class_names: tuple[str, ...], source: str) -> None:
    for shard in chain.from_iterable(splits.values()):
        outside = [label for label in shard.labels if not 0 <= label < len(class_names)]
        if outside:
            raise DataError(
                f"label {outside[0]} in the shard {shard.url} is outside the {len(class_names)} classes of "
                f"{source}; correct the label, or the list of class names."
            )
    labels_by_split = {split: {label for shard in shards for label in shard.labels} for split, shards in splits.items()}
    check_trained(labels_by_split, class_names, source)
