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
    def closeness(self, tables: Tables, sizes: Float[Tensor, "batch patches"]) -> Float[Tensor, "batch first second"]:
        """Says how near every patch at an even place is to every one at an odd place: the larger, the nearer."""

    def finished(self, tables: Tables, merged: Int[Tensor, "merged"] | None) -> Float[Tensor, "batch patches width"]:
        """Gives the patches as they go on.

        Only those at `merged` (some perhaps twice), counted through all images, are not as they were; None: any.
        """
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
        tables, sizes, kept = self.tables(seen), seen.sizes[:, seen.prefix :], None
        if not seen.whole:
            kept = places_of(seen.there > 0, seen.present)
            tables = {name: rows_of(table, kept) for name, table in tables.items()}
            sizes = sizes.gather(1, kept)
        first, merged = sizes.shape[1], None
        while (patches := sizes.shape[1]) > count:
            merging = self._round(tables, sizes, patches - count)
            tables = {name: merging.of(table) for name, table in tables.items()}
            merged = merging.into if patches == first else None  # of several rounds, any patch may be new
            sizes, kept = merging.sizes, merging.stay if kept is None else kept.gather(1, merging.stay)
        if kept is None:
            kept = torch.arange(first, device=sizes.device).expand(sizes.shape[0], -1)
        return Reduction(kept, self.finished(tables, merged), sizes=sizes)

    def _round(self, tables: Tables, sizes: Float[Tensor, "batch patches"], most: int) -> "Round":
        near, nearest = self.closeness(tables, sizes).max(-1)
        leaving = near.argsort(dim=1, descending=True, stable=True)[:, :most]
        return Round(sizes, 2 * leaving, 2 * nearest.gather(1, leaving) + 1)


class Round:
    """What one round does: patches at `sources` leave into those at `goals`, and the others `stay`.

    Only those that others leave into change: what they move by is added to them. Among what is left, counted through
    all images, they are at `into`. Small batches spend their time on starting operations, so there are few.
    """

    def __init__(
        self,
        sizes: Float[Tensor, "batch patches"],
        sources: Int[Tensor, "batch merged"],
        goals: Int[Tensor, "batch merged"],
    ):
        patches = sizes.shape[1]
        left = patches - sources.shape[1]
        gone = sizes.gather(1, sources)
        grown = sizes.scatter_add(1, goals, gone)
        there = torch.ones_like(sizes, dtype=torch.bool).scatter(1, sources, False)
        self.stay = places_of(there, left)
        self.sizes = grown.gather(1, self.stay)
        self._shares = (gone / grown.gather(1, goals)).flatten()[:, None]
        image = torch.arange(sizes.shape[0], device=sizes.device)[:, None]
        before = image * patches
        self._sources, self._goals, self._stay = ((before + rows).flatten() for rows in (sources, goals, self.stay))
        self.into = (image * left - 1 + there.cumsum(1).gather(1, goals)).flatten()

    def of(self, table: Float[Tensor, "batch patches features"]) -> Float[Tensor, "batch left features"]:
        """Gives what is left of a table."""
        rows = table.flatten(0, 1)
        left = rows.index_select(0, self._stay)
        moved = (rows.index_select(0, self._sources) - rows.index_select(0, self._goals)) * self._shares
        return left.index_add_(0, self.into, moved).view(*self.stay.shape, -1)


def places_of(there: Bool[Tensor, "batch patches"], present: int) -> Int[Tensor, "batch present"]:
    """Gives the places of the patches that are there, in order; of every image there are so many."""
    return there.to(torch.int32).argsort(dim=1, descending=True, stable=True)[:, :present]


def rows_of(
    table: Float[Tensor, "batch rows features"], chosen: Int[Tensor, "batch chosen"]
) -> Float[Tensor, "batch chosen features"]:
    """Gives some rows of every image."""
    # Whole rows are copied at once, which gather, element by element, does not do.
    image = torch.arange(chosen.shape[0], device=chosen.device)[:, None]
    rows = table.flatten(0, 1).index_select(0, (image * table.shape[1] + chosen).flatten())
    return rows.unflatten(0, chosen.shape)
