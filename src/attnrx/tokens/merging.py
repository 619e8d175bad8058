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

    by: ClassVar[str] = "patches"
    """The table that patches are compared by."""

    @abstractmethod
    def tables(self, seen: Seen) -> Tables:
        """Gives what is merged: the "patches", and whatever else patches are compared by."""

    @abstractmethod
    def closeness(
        self,
        first: Float[Tensor, "batch first features"],
        second: Float[Tensor, "batch second features"],
        first_sizes: Float[Tensor, "batch first"],
        second_sizes: Float[Tensor, "batch second"],
    ) -> Float[Tensor, "batch first second"]:
        """Says how near every patch of the first set is to every one of the second: the larger, the nearer."""

    def finished(
        self, tables: Tables, merged: Int[Tensor, "batch merged"] | None
    ) -> Float[Tensor, "batch patches width"]:
        """Gives the patches as they go on; only those at `merged` (some perhaps twice) are not as they were, or any."""
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
        tables, sizes = self.tables(seen), seen.sizes[:, seen.prefix :]
        if seen.whole:
            kept = torch.arange(sizes.shape[1], device=sizes.device).expand(sizes.shape[0], -1)
        else:
            kept = places_of(seen.there > 0, seen.present)
            tables = {name: rows_of(table, kept) for name, table in tables.items()}
            sizes = sizes.gather(1, kept)
        first, merged = kept.shape[1], None
        while kept.shape[1] > count:
            merging = self._round(tables, sizes, kept.shape[1] - count)
            tables = {name: merging.of(table) for name, table in tables.items()}
            merged = merging.into if kept.shape[1] == first else None  # of several rounds, any patch may be new
            sizes, kept = merging.sizes, kept.gather(1, merging.stay)
        return Reduction(kept, self.finished(tables, merged), sizes=sizes)

    def _round(self, tables: Tables, sizes: Float[Tensor, "batch patches"], most: int) -> "Round":
        compared = tables[self.by]
        near, nearest = self.closeness(compared[:, 0::2], compared[:, 1::2], sizes[:, 0::2], sizes[:, 1::2]).max(-1)
        leaving = near.argsort(dim=1, descending=True, stable=True)[:, :most]
        return Round(sizes, 2 * leaving, 2 * nearest.gather(1, leaving) + 1)


class Round:
    """What one round does: patches at `sources` leave into those at `goals`, and the others `stay`.

    Only those that others leave into change: what they move by is added to them. Among what is left they are at `into`.
    """

    def __init__(
        self,
        sizes: Float[Tensor, "batch patches"],
        sources: Int[Tensor, "batch merged"],
        goals: Int[Tensor, "batch merged"],
    ):
        self.sources, self.goals = sources, goals
        gone = sizes.gather(1, sources)
        grown = sizes.scatter_add(1, goals, gone)
        there = torch.ones_like(sizes, dtype=torch.bool).scatter(1, sources, False)
        self.stay = places_of(there, sizes.shape[1] - sources.shape[1])
        self.sizes = grown.gather(1, self.stay)
        self.shares = gone / grown.gather(1, goals)
        self.into = there.cumsum(1).gather(1, goals) - 1

    def of(self, table: Float[Tensor, "batch patches features"]) -> Float[Tensor, "batch left features"]:
        """Gives what is left of a table."""
        table = table.contiguous()
        left = rows_of(table, self.stay)
        moved = (rows_of(table, self.sources) - rows_of(table, self.goals)) * self.shares[..., None]
        into = flat_places(self.into, left.shape[1])
        return left.flatten(0, 1).index_add_(0, into, moved.flatten(0, 1)).unflatten(0, left.shape[:2])


def places_of(there: Bool[Tensor, "batch patches"], present: int) -> Int[Tensor, "batch present"]:
    """Gives the places of the patches that are there, in order; of every image there are so many."""
    return there.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :present]


def rows_of(
    table: Float[Tensor, "batch rows features"], chosen: Int[Tensor, "batch chosen"]
) -> Float[Tensor, "batch chosen features"]:
    """Gives some rows of every image."""
    # Whole rows are copied at once, which gather, element by element, does not do.
    rows = table.flatten(0, 1).index_select(0, flat_places(chosen, table.shape[1]))
    return rows.unflatten(0, chosen.shape)


def flat_places(chosen: Int[Tensor, "batch chosen"], rows: int) -> Int[Tensor, "all"]:
    """Gives the places among the rows of all images, one image after the other."""
    return (torch.arange(chosen.shape[0], device=chosen.device)[:, None] * rows + chosen).flatten()
