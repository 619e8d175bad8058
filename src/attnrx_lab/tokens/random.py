"""The random control for token reducers, which selects patches by a hash of the image's pixels."""

from dataclasses import dataclass

import torch
from torch import nn

from attnrx.support.errors import InvalidInput
from attnrx.support.shapes import Float, Int, Tensor
from attnrx.vit.tokens import Selecting, TokenState
from attnrx.vit.tokens.reducer import PerPatch

SEEDS = 2**31
STEP = 2**20  # pixels are hashed as multiples of 1 / STEP
LARGEST = 2**31 - 128  # the largest multiple that float32 represents


@dataclass(frozen=True)
class Random(Selecting):
    """Keeps random patches.

    The score of a patch is a hash of the seed, the pixels of its image and its index. The score does not depend on the
    batch, the threads or the device, and an exported model computes the same score. All stages use the same scores. A
    later stage still draws at random, because the best m of n patches in random order are a random choice. Identical
    images keep the same patches. If two images differ at all, e.g. by augmentation or rounding, they keep different
    patches.
    """

    seed: int = 0

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.seed < SEEDS:
            raise InvalidInput(f"random(seed={self.seed}): give a seed from 0 to {SEEDS - 1}.")

    def image_keys(self, images: Float[Tensor, "batch channels height width"]) -> Int[Tensor, "batch"]:
        return image_keys(images)

    def relevance(self, state: TokenState, predictor: nn.Module) -> PerPatch:
        """Returns a score in [0, 1) for every patch, including tokens that an earlier stage added."""
        keys = state.image_keys
        assert keys is not None
        image = scrambled(scrambled(torch.full_like(keys, self.seed)) ^ keys)
        patch = scrambled(image[:, None] ^ (state.patch_indices + 1))
        return ((patch >> 8) & 0xFFFFFF).to(torch.float32) / (1 << 24)  # 24 bits, which float32 represents exactly


def image_keys(images: Float[Tensor, "batch channels height width"]) -> Int[Tensor, "batch"]:
    """Returns a 32-bit hash of every image, computed from sums over columns, rows and channels with hashed weights.

    Pixels are converted to float32 and then to integers. So the hash does not depend on the order of summation.
    """
    numbers = (images.float() * STEP).round_().clamp_(-LARGEST, LARGEST).to(torch.int64)
    # Every axis hashes a separate range of 0x10001 numbers.
    for axis in range(images.ndim - 1):
        indices = torch.arange(numbers.shape[-1], device=images.device)
        weights = scrambled(indices + (axis + 1) * 0x10001) | 1
        # 31 bits each, because sums in ONNX Runtime do not wrap around. In-place operations are three times as fast.
        numbers = scrambled(numbers.mul_(weights).bitwise_right_shift_(1).bitwise_and_(0x7FFFFFFF).sum(-1))
    return numbers


def scrambled(number: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """Hashes the lower 32 bits with the finalizer of MurmurHash3, and returns the hash in the lower 32 bits.

    Products may overflow, so the higher bits of the result are undefined. A runtime without 64-bit integers computes
    the same lower 32 bits.
    """
    number = (number ^ ((number >> 16) & 0xFFFF)) * (0x85EBCA6B - (1 << 32))
    number = (number ^ ((number >> 13) & 0x7FFFF)) * (0xC2B2AE35 - (1 << 32))
    return number ^ ((number >> 16) & 0xFFFF)
