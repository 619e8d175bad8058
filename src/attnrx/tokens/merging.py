"""Merging: patches that are near become one, round by round."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from attnrx.shapes import Bool, Float, Int, Tensor
from attnrx.tokens.reducer import Reducer, Reduction
from attnrx.tokens.seen import Seen

Tables = dict[str, Float[Tensor, "batch patches _"]]


@dataclass(frozen=True)
class Merging(Reducer):
    """Merges by bipartite soft matching (ToMe, Bolya et al., 2023), whatever says which patches are near.

    Patches are divided by turns into two sets; every patch of the first proposes to the nearest of the second, and the
    best proposals are merged into means weighted by size. Later attention is proportional. A round merges one of the
    sets at most; where more must go, rounds follow.
    """

    proportional: ClassVar[bool] = True

    @abstractmethod
    def tables(self, seen: Seen) -> Tables:
        """Gives what is merged: the "patches", and whatever else patches are compared by."""

    @abstractmethod
    def closeness(
        self, tables: Tables, sizes: Float[Tensor, "batch patches"], first: Tensor, second: Tensor
    ) -> Float[Tensor, "batch first second"]:
        """Says how near the patches at `first` are to those at `second`: the larger, the nearer."""

    def finished(self, tables: Tables) -> Float[Tensor, "batch patches width"]:
        """Gives the patches as they go on."""
        return tables["patches"]

    def compared(self, features: int, patches: int, count: int) -> int:
        """MACs of comparing the two sets of every round by so many features."""
        total = 0
        while patches > count:
            second = patches // 2
            total += (patches - second) * second * features
            patches -= min(patches - second, patches - count)
        return total

    def reduce(self, seen: Seen, count: int, predictor: nn.Module) -> Reduction:
        """Merges until `count` are left."""
        there, sizes, present, tables = seen.there > 0, seen.sizes[:, seen.prefix :], seen.present, self.tables(seen)
        while present > count:
            places = places_of(there, present)
            first, second = places[:, 0::2], places[:, 1::2]
            near, nearest = self.closeness(tables, sizes, first, second).max(-1)
            leaving = near.argsort(dim=1, descending=True, stable=True)[:, : present - count]
            sources, goals = first.gather(1, leaving), second.gather(1, nearest.gather(1, leaving))
            grown = sizes.scatter_add(1, goals, sizes.gather(1, sources))
            tables = {name: _merged(table, sizes, grown, sources, goals) for name, table in tables.items()}
            sizes, there = grown, there.scatter(1, sources, False)
            present -= sources.shape[1]
        kept = places_of(there, present)
        return Reduction(kept, rows_of(self.finished(tables), kept), sizes=sizes.gather(1, kept))


def _merged(
    table: Float[Tensor, "batch patches features"],
    sizes: Float[Tensor, "batch patches"],
    grown: Float[Tensor, "batch patches"],
    sources: Int[Tensor, "batch merged"],
    goals: Int[Tensor, "batch merged"],
) -> Float[Tensor, "batch patches features"]:
    weighed = table * sizes[..., None]
    gone = rows_of(weighed, sources)
    return weighed.scatter_add(1, goals[..., None].expand_as(gone), gone) / grown.clamp_min(1)[..., None]


def places_of(there: Bool[Tensor, "batch patches"], present: int) -> Int[Tensor, "batch present"]:
    """Gives the places of the patches that are there, in order; of every image there are so many."""
    return there.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :present]


def rows_of(
    table: Float[Tensor, "batch rows features"], chosen: Int[Tensor, "batch chosen"]
) -> Float[Tensor, "batch chosen features"]:
    """Gives some rows of every image."""
    return table.gather(1, chosen[..., None].expand(-1, -1, table.shape[2]))
