"""The control: patches chosen by chance."""

from dataclasses import dataclass

import torch
from torch import nn

from attnrx.shapes import Float, Int, Tensor
from attnrx.tokens.reducer import Selecting
from attnrx.tokens.seen import Seen

BITS = (1 << 32) - 1


@dataclass(frozen=True)
class Random(Selecting):
    """Keeps random patches, others in every image of a batch; the same at every stage, so that none comes back.

    The number of a patch follows from the seed, the place of its image in the batch and its own place in the image, by
    arithmetic on integers: nothing is drawn, so it is the same on every device and in an exported model.
    """

    seed: int = 0

    def relevance(self, seen: Seen, predictor: nn.Module) -> Float[Tensor, "batch patches"]:
        """Gives every patch of the image its number in [0, 1), by its place."""
        places = seen.places.clamp(min=0)
        image = torch.arange(places.shape[0], device=places.device)[:, None]
        mixed = scrambled(scrambled(scrambled(torch.full_like(image, self.seed & BITS)) ^ image) ^ places)
        return (mixed >> 8).to(torch.float32) / (1 << 24)  # as many bits as float32 holds exactly


def scrambled(number: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """Gives 32 bits that depend on all of the number's lower 32: the finalizer of MurmurHash3 (Appleby, 2011)."""
    number = number & BITS
    number = ((number ^ (number >> 16)) * 0x85EBCA6B) & BITS
    number = ((number ^ (number >> 13)) * 0xC2B2AE35) & BITS
    return number ^ (number >> 16)
