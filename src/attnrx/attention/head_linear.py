"""A linear projection whose heads may have different numbers of rows."""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import nn

from attnrx.attention.factors import Bucket
from attnrx.attention.kept import Kept
from attnrx.shapes import Float, Tensor


class HeadLinear(nn.Module):
    """Projects tokens to `rows[h]` features for every head h, stored unpadded in one weight of sum(rows) rows."""

    def __init__(self, width: int, rows: tuple[int, ...]):
        super().__init__()
        self.rows = rows
        self.weight = nn.Parameter(torch.empty(sum(rows), width))
        self.bias = nn.Parameter(torch.zeros(sum(rows)))
        if self.weight.numel():  # every head may have rank 0, or be gone
            nn.init.trunc_normal_(self.weight, std=0.02)
        self._kept: Kept[tuple[Tensor, Tensor]] = Kept()

    def forward(self, tokens: Float[Tensor, "batch tokens width"]) -> Float[Tensor, "batch tokens rows"]:
        """Projects tokens to the features of all heads, one after the other."""
        return F.linear(tokens, self.weight, self.bias)

    def buckets(
        self, tokens: Float[Tensor, "batch tokens width"], rows: tuple[int, ...], buckets: tuple[Bucket, ...]
    ) -> list[Float[Tensor, "batch tokens _ _"]]:
        """Gives one tensor per bucket, [batch, tokens, heads of the bucket, rows], from a single matrix product.

        `rows` says how many rows each head gets; rows beyond its own are zero.
        """
        batch, length, _ = tokens.shape
        own = (self.weight, self.bias)
        weight, bias = own if rows == self.rows else self._kept(rows, own, lambda: self._spread(rows))
        features = F.linear(tokens, weight, bias)
        if len(buckets) == 1:
            return [features.view(batch, length, len(rows), -1)]
        widths = [sum(rows[bucket.heads]) for bucket in buckets]
        parts = features.split(widths, dim=-1)
        return [part.unflatten(-1, (b.stop - b.start, -1)) for part, b in zip(parts, buckets, strict=True)]

    def _spread(self, rows: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        index = padding_index(self.rows, rows).to(self.weight.device)
        weight = F.pad(self.weight, (0, 0, 0, 1)).index_select(0, index)
        return weight, F.pad(self.bias, (0, 1)).index_select(0, index)


@lru_cache(maxsize=256)
def padding_index(own: tuple[int, ...], wanted: tuple[int, ...]) -> Tensor:
    """Maps every padded row to its stored row, or to the zero row that follows the last one."""
    zero, index, first = sum(own), [], 0
    for stored, padded in zip(own, wanted, strict=True):
        index += [*range(first, first + stored), *([zero] * (padded - stored))]
        first += stored
    return torch.tensor(index, dtype=torch.long)
