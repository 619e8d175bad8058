"""ToMe: the patches that are most alike become one."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from attnrx.shapes import Float, Tensor
from attnrx.tokens.reducer import Reducer, Reduction, Shape
from attnrx.tokens.seen import Seen


@dataclass(frozen=True)
class ToMe(Reducer):
    """Merges the most similar patches by bipartite soft matching (Bolya et al., 2023), written from the paper.

    Patches are divided by turns into two sets; every patch of the first proposes to the most similar of the second
    (cosine of the mean keys over the heads), and the best proposals are merged into means weighted by size. Later
    attention is proportional. At most half of the patches can be merged at one stage; as published a little is
    merged in every layer, inside it; here it is before a layer.
    """

    needs: ClassVar[tuple[str, ...]] = ("keys",)
    proportional: ClassVar[bool] = True

    def predictor_macs(self, shape: Shape, patches: int) -> int:
        """MACs of comparing the two sets by their keys."""
        return (patches // 2) * (patches - patches // 2) * shape.directions

    def least(self, patches: int) -> int:
        """Half of them."""
        return patches // 2

    def reduce(self, seen: Seen, count: int, predictor: nn.Module) -> Reduction:
        """Merges until `count` are left."""
        assert seen.keys is not None
        there = seen.there > 0
        order = there.to(torch.int8).argsort(dim=1, descending=True, stable=True)  # those still there, in their order
        present = order[:, : int(there[0].sum())]
        first, second = present[:, 0::2], present[:, 1::2]
        left = present.shape[1] - count
        merged = min(left, first.shape[1])
        keys = nn.functional.normalize(seen.keys[:, seen.prefix :], dim=-1)
        alike = _rows(keys, first) @ _rows(keys, second).transpose(1, 2)
        closeness, nearest = alike.max(-1)
        by_closeness = closeness.argsort(dim=1, descending=True, stable=True)
        leaving = by_closeness[:, :merged]
        sources, goals = first.gather(1, leaving), second.gather(1, nearest.gather(1, leaving))
        sizes = seen.sizes[:, seen.prefix :]
        weighed = seen.patches * sizes[..., None]
        gone = _rows(weighed, sources)
        weighed = weighed.scatter_add(1, goals[..., None].expand_as(gone), gone)
        grown = sizes.scatter_add(1, goals, sizes.gather(1, sources))
        kept_mask = there.scatter(1, sources, False)
        kept = kept_mask.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, : present.shape[1] - merged]
        kept = kept.sort(dim=1).values
        own = grown.gather(1, kept)
        return Reduction(kept, _rows(weighed, kept) / own[..., None], sizes=own)


def _rows(table: Float[Tensor, "batch rows width"], chosen: Tensor) -> Tensor:
    return table.gather(1, chosen[..., None].expand(-1, -1, table.shape[2]))
