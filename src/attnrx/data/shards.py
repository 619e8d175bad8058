"""Splits that are read from tar shards, for datasets that fit neither memory nor one machine's disk.

Each process reads shards of its own from front to back, the first and the last of them perhaps in part: of the images
that a pass shows, every one is seen by one process, once. Unlike for other splits, N processes see them in another
order than one; resuming at a step reads, without decoding, what came before it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import torch

from attnrx.data.images import Batch, ImageSet, digest, rows_of_part
from attnrx.data.normalization import Normalization
from attnrx.data.passes import ORDER, Pass, generator
from attnrx.data.readers.shards import OpenedShards, Sample, Shard, cut, read
from attnrx.data.splits import VALIDATION_IS_TEST
from attnrx.data.streaming import Stream, Work
from attnrx.errors import DataError

WINDOW = 2048  # encoded images that are shuffled among each other, beside the order of the shards

Row = tuple[Sample, int]  # a sample and its row in the split


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
        """The images left out so far because they could not be decoded."""
        return tuple(self.stream.corrupt.met)

    @property
    def fingerprint(self) -> str:
        """Hashes the counts and names of the shards and the labels that occur in each."""
        names = (f"{shard.url.rpartition('/')[2]}{shard.count}{shard.labels}".encode() for shard in self.shards)
        return digest(self.name, torch.tensor([shard.count for shard in self.shards]), names)

    def take(self, count: int) -> "ImageSet":
        """Returns the first `count` images as they are stored; their classes are not known beforehand."""
        if not 1 <= count <= len(self):
            raise DataError(
                f"{count} images were requested of a split that holds {len(self)}; ask for 1 to {len(self)}."
            )
        taken = [
            replace(shard, count=min(shard.count, count - shard.first)) for shard in self.shards if shard.first < count
        ]
        return replace(self, shards=tuple(taken))

    def part(self, process: int, processes: int, batch_size: int) -> "ImageSet":
        """Returns whole batches of an ordered pass."""
        return replace(self, shards=tuple(cut(self.shards, rows_of_part(len(self), process, processes, batch_size))))

    def renormalized(self, normalization: Normalization) -> "ImageSet":
        """Returns the same images on another scale."""
        return replace(self, stream=replace(self.stream, normalization=normalization))

    def _pass(self, order: Pass) -> Iterator[Batch]:
        return self.stream.batches(self._works(order, self._own(order)), order)

    def _own(self, order: Pass) -> list[Shard]:
        """Cuts what this process reads out of all shards, which a shuffled pass puts into another order first."""
        process, processes = order.shard
        if order.seed is None:
            count = len(self)
            return cut(self.shards, slice(count * process // processes, count * (process + 1) // processes))
        shards = torch.randperm(len(self.shards), generator=generator(order.seed, ORDER)).tolist()
        share = order.length(len(self)) * order.local_size
        return cut([self.shards[number] for number in shards], slice(share * process, share * (process + 1)))

    def _works(self, order: Pass, own: list[Shard]) -> Iterator[Work]:
        """Cuts the samples of this process into batches; a shuffled pass has as many steps in every process."""
        order.length(len(self))  # refuses a pass without steps, and a start after its end
        size, process = order.local_size, order.shard[0]
        samples = _in_order(own) if order.seed is None else _shuffled(own, order.seed, process)
        samples = islice(samples, order.start * size, None)
        number = order.start
        while rows := list(islice(samples, size)):
            share = slice(process * size, process * size + len(rows))
            yield Work(
                pictures=[partial(sample.picture, self.stream.geometry.channels) for sample, _ in rows],
                labels=torch.tensor([sample.label for sample, _ in rows]),
                index=torch.tensor([row for _, row in rows]),
                draws=order.draws(number, order.batch_size, share),
            )
            number += 1


def _in_order(shards: list[Shard]) -> Iterator[Row]:
    for shard in shards:
        for number, sample in enumerate(read(shard)):
            yield sample, shard.first + number


def _shuffled(shards: list[Shard], seed: int, process: int) -> Iterator[Row]:
    """Shuffles window by window."""
    samples, window = _in_order(shards), 0
    while rows := list(islice(samples, WINDOW)):
        for position in torch.randperm(len(rows), generator=generator(seed, ORDER, 1 + process, window)).tolist():
            yield rows[position]
        window += 1


def assign_shards(opened: OpenedShards, place: str) -> tuple[dict[str, tuple[Shard, ...]], tuple[str, ...]]:
    """Returns every shard to train, validation or test: what is missing is a tenth of train's shards, the last ones."""
    splits, notes = dict(opened.splits), []
    trained = "train" in splits
    if "test" not in splits and "validation" in splits:
        splits["test"] = splits.pop("validation") if trained else splits["validation"]
        notes.append(VALIDATION_IS_TEST)
    for split in ("test", "validation"):
        if split in splits or not trained:
            continue
        train = splits["train"]
        held = -(-len(train) // 10)
        if held >= len(train):
            raise DataError(
                f"{place} has no {split} shards, and too few train shards to hold one out; write more, smaller ones."
            )
        splits["train"], held_out = train[:-held], train[-held:]
        splits[split] = tuple(replace(shard, first=shard.first - held_out[0].first) for shard in held_out)
        notes.append(f"no {split} split: the last {held} of {len(train)} train shards are held out")
    _check_labels(splits, opened.class_names, place)
    return splits, tuple(notes)


def _check_labels(splits: dict[str, tuple[Shard, ...]], class_names: tuple[str, ...], place: str) -> None:
    for split, shards in splits.items():
        for shard in shards:
            outside = [label for label in shard.labels if not 0 <= label < len(class_names)]
            if outside:
                raise DataError(
                    f"label {outside[0]} in the shard {shard.url} is outside the {len(class_names)} classes of "
                    f"{place}; correct the label, or the list of class names."
                )
        train = {label for shard in splits.get("train", shards) for label in shard.labels}
        strange = sorted({label for shard in shards for label in shard.labels} - train)
        if strange:
            raise DataError(
                f"label mismatch between the splits of {place}: class {class_names[strange[0]]!r} occurs in {split} "
                "but never in train; check that both count the same classes."
            )
