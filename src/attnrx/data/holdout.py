"""Holding images out: the same share of every class, decided by a hash, so that it is the same everywhere."""

import hashlib
from collections.abc import Sequence

import torch

from attnrx.shapes import Bool, Int, Tensor


def held_out(
    labels: Int[Tensor, "images"], keys: Sequence[str | int], share: float, seed: int
) -> Bool[Tensor, "images"]:
    """Marks `share` of every class: the images with the lowest hash of seed and key.

    At least one image of a class that has two, never the last one of a class.
    """
    hashes = torch.tensor([_hash(seed, key) for key in keys], dtype=torch.int64)
    by_hash = hashes.argsort(stable=True)
    by_class = by_hash[labels[by_hash].argsort(stable=True)]  # classes together, lowest hash first in each
    sizes = labels.bincount()
    wanted = (sizes * share).round().long().clamp(min=1)
    wanted = torch.where(sizes > 1, torch.minimum(wanted, sizes - 1), torch.zeros_like(sizes))
    first = sizes.cumsum(0) - sizes
    turn = torch.arange(len(labels)) - first[labels[by_class]]
    marked = torch.zeros(len(labels), dtype=torch.bool)
    marked[by_class] = turn < wanted[labels[by_class]]
    return marked


def _hash(seed: int, key: str | int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}\0{key}".encode(), digest_size=7).digest())  # 56 bits: a signed int64
