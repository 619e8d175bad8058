"""One pass over a split: which images each step takes, in which process, with which random numbers.

Two laws, which the trainer's exact resume and its several processes stand on:

    a pass that starts at step s  ==  the same pass from the beginning, without its first s steps
    N processes, side by side     ==  one process: same images, same order, same random numbers
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from attnrx.data.augmentation import Augmentation, Draws
from attnrx.errors import DataError, InvalidInput
from attnrx.shapes import Int, Tensor

ORDER, AUGMENTATION = 0, 1  # what a generator is for, so that the two never share random numbers


def generator(*parts: int) -> torch.Generator:
    """Returns a CPU generator that depends on every part; neighbouring seeds or steps have unrelated numbers."""
    state = np.random.SeedSequence(parts).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]))


@dataclass(frozen=True)
class PassStep:
    """What one process takes at one step: its share of the batch of all processes."""

    number: int
    positions: Int[Tensor, "local"]
    share: slice
    size: int


@dataclass(frozen=True)
class Pass:
    """The arguments of `ImageSet.batches`."""

    batch_size: int
    seed: int | None
    augmentation: Augmentation | None
    device: torch.device
    shard: tuple[int, int]
    start: int

    def __post_init__(self):
        process, processes = self.shard
        if not 0 <= process < processes:
            raise InvalidInput(f"shard={self.shard}: give (process, processes) with 0 <= process < processes.")
        if self.batch_size < 1 or self.batch_size % processes:
            raise InvalidInput(
                f"batch_size={self.batch_size} is for all {processes} processes together: "
                "give a positive multiple of their number."
            )
        if self.augmentation is not None and self.seed is None:
            raise InvalidInput("augmentation was given without a seed: random crops need one to be repeatable.")
        if self.start < 0 or (self.seed is not None and self.seed < 0):
            raise InvalidInput(f"start={self.start}, seed={self.seed}: neither may be negative.")

    @property
    def local_size(self) -> int:
        """How many images of a whole batch this process takes."""
        return self.batch_size // self.shard[1]

    def length(self, count: int) -> int:
        """Returns the number of steps over `count` images; a shuffled pass drops the last incomplete batch."""
        steps = count // self.batch_size if self.seed is not None else -(-count // self.batch_size)
        if steps == 0:
            raise DataError(
                f"a shuffled pass takes whole batches of {self.batch_size}, but the split holds {count} images; "
                "use a smaller batch size."
            )
        if self.start > steps:
            raise DataError(
                f"a pass cannot start at step {self.start}: it has {steps} steps of {self.batch_size} images."
            )
        return steps

    def steps(self, count: int) -> Iterator[PassStep]:
        """Yields the steps over `count` images; a share without images (at the end of an ordered pass) is skipped."""
        steps = self.length(count)
        order = torch.arange(count)
        if self.seed is not None:
            order = torch.randperm(count, generator=generator(self.seed, ORDER))
        process, processes = self.shard
        for number in range(self.start, steps):
            batch = order[number * self.batch_size : (number + 1) * self.batch_size]
            share = slice(len(batch) * process // processes, len(batch) * (process + 1) // processes)
            if share.start < share.stop:
                yield PassStep(number, batch[share], share, len(batch))

    def draws(self, number: int, size: int, share: slice) -> Draws | None:
        """Returns this process's random numbers of step `number`: drawn for the whole batch, then cut."""
        if self.augmentation is None or self.seed is None:
            return None
        return self.augmentation.draw(size, generator(self.seed, AUGMENTATION, number)).part(share)
