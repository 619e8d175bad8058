"""What attention layers receive of the positions of their tokens: rotations of rotary embeddings, biases of pairs."""

from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch

from attnrx.support.shapes import Float, Int, Tensor


@dataclass(frozen=True, eq=False)
class Positions:
    """The rotations and the biases of the tokens of one layer, of all images or of each.

    `cos` and `sin` are the rotation of every patch for each frequency of the original head, equal for all heads or of
    each original head. `bias` is added to the scores of every pair of tokens, those before the patches (`prefix` of
    them) included; these are not rotated. The first axis has one entry for all images, or one for each. `tables` has
    the rotations in the form of the C++ kernel, by layer, where one was computed.
    """

    prefix: int
    cos: Float[Tensor, "_ patches heads pairs"] | None = None
    sin: Float[Tensor, "_ patches heads pairs"] | None = None
    bias: Float[Tensor, "_ _ tokens tokens"] | None = None
    tables: "WeakKeyDictionary[Any, Any] | None" = field(init=False, repr=False, default=None)

    def of_patches(self, indices: Int[Tensor, "images kept"] | None) -> "Positions":
        """Returns the positions of the tokens that are left: `indices` are their patches, -1 for a token of none, which
        is not rotated and has no bias; None stands for all patches.
        """
        if indices is None:
            return self
        # gather refuses -1: such tokens get the entries of patch 0, which are then overwritten.
        added, safe = indices < 0, indices.clamp_min(0)
        cos = sin = bias = None
        if self.cos is not None and self.sin is not None:
            # The rotation by zero, cos 1 and sin 0. [images, kept, heads, pairs].
            cos = _gathered(self.cos, safe).masked_fill(added[..., None, None], 1.0)
            sin = _gathered(self.sin, safe).masked_fill(added[..., None, None], 0.0)
        if self.bias is not None:
            # A bias is of all tokens, and `indices` are of patches: those of the prefix precede them.
            first = torch.arange(self.prefix, device=indices.device).expand(indices.shape[0], -1)
            tokens = torch.cat([first, self.prefix + safe], dim=1)
            images, heads, count = indices.shape[0], *self.bias.shape[1:3]
            # Queries, then keys: [images, heads, kept, tokens], then [images, heads, kept, kept].
            rows = tokens[:, None, :, None].expand(-1, heads, -1, count)
            bias = self.bias.expand(images, -1, -1, -1).gather(2, rows)
            bias = bias.gather(3, tokens[:, None, None, :].expand(-1, heads, tokens.shape[1], -1))
            absent = torch.nn.functional.pad(added, (self.prefix, 0))
            bias = bias.masked_fill(absent[:, None, :, None] | absent[:, None, None, :], 0.0)
        return replace(self, cos=cos, sin=sin, bias=bias)

    def of_first(self, count: int) -> "Positions":
        """Returns the rotations of the first `count` tokens."""
        if self.cos is None or self.sin is None:
            return self
        patches = max(count - self.prefix, 0)
        return replace(self, cos=self.cos[:, :patches], sin=self.sin[:, :patches])

    def bias_of(self, heads: tuple[int, ...], queries: int) -> Float[Tensor, "images _ queries keys"] | None:
        """Returns the bias of these original heads for the first `queries` tokens as queries."""
        if self.bias is None:
            return None
        # Indexing copies, so all heads and all queries are returned as they are.
        bias = (
            self.bias
            if heads == tuple(range(self.bias.shape[1]))
            else torch.cat([self.bias[:, head : head + 1] for head in heads], 1)
        )
        return bias if queries == bias.shape[2] else bias[:, :, :queries]


def _gathered(table: Float[Tensor, "_ patches heads pairs"], indices: Int[Tensor, "images kept"]) -> Tensor:
    if table.shape[0] == 1:  # one table for all images: indexing it needs no expanded index
        return table[0][indices]
    return table.gather(1, indices[..., None, None].expand(-1, -1, *table.shape[2:]))
