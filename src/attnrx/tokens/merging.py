"""Merging: patches that are near become one, round by round."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from attnrx.shapes import Bool, Float, Int, Tensor
from attnrx.tokens.reducer import Reducer, Reduction
from attnrx.tokens.state import TokenState

Tables = dict[str, Float[Tensor, "batch _ _"]]
Indices = Int[Tensor, "batch _"]


class Turns:
    """The two sets of a round, by turns: patches at even indices into patches at odd ones."""

    def of(self, table: Float[Tensor, "batch patches _"]) -> tuple[Tensor, Tensor]:
        """Returns the rows of the first set and those of the second."""
        return table[:, 0::2], table[:, 1::2]

    def indices(self, first: Indices, second: Indices) -> tuple[Indices, Indices]:
        """Returns the patches at these positions of the first and of the second set."""
        return 2 * first, 2 * second + 1


@dataclass(frozen=True)
class Sets:
    """The two sets of a round, by their patches; patches in neither are not merged."""

    first: Indices
    second: Indices

    def of(self, table: Float[Tensor, "batch patches _"]) -> tuple[Tensor, Tensor]:
        """Returns the rows of the first set and those of the second."""
        return rows_of(table, self.first), rows_of(table, self.second)

    def indices(self, first: Indices, second: Indices) -> tuple[Indices, Indices]:
        """Returns the patches at these positions of the first and of the second set."""
        return self.first.gather(1, first), self.second.gather(1, second)


@dataclass(frozen=True)
class Merging(Reducer):
    """Merges by bipartite soft matching (ToMe, Bolya et al., 2023), for any measure of closeness and any two sets.

    Patches are divided into two sets, by turns unless `split` is overridden. Every patch of the first set is matched
    with the closest patch of the second, and the closest pairs are merged into means weighted by size. Later attention
    is proportional. A round merges one of the sets at most; where more must be merged, rounds follow.
    """

    proportional: ClassVar[bool] = True

    @abstractmethod
    def tables(self, state: TokenState) -> Tables:
        """Returns what is merged: the "patches", and whatever else patches are compared by."""

    @abstractmethod
    def features(self, tables: Tables, sizes: Float[Tensor, "batch patches"]) -> Tables:
        """Returns what patches are compared by in one round, a row for every patch."""

    @abstractmethod
    def closeness(self, first: Tables, second: Tables) -> Float[Tensor, "batch first second"]:
        """Returns how close every patch of the first set is to every one of the second: the larger, the closer."""

    def split(self, state: TokenState, features: Tables, most: int) -> Turns | Sets:
        """Divides the patches of one round, of which at most `most` are merged, into two sets."""
        return Turns()

    def finished(self, tables: Tables, merged: Int[Tensor, "merged"] | None) -> Float[Tensor, "batch patches width"]:
        """Returns the patches as they go on.

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

    def reduce(self, state: TokenState, count: int, predictor: nn.Module) -> Reduction:
        """Merges until `count` are left."""
        tables, sizes, kept = self.tables(state), state.sizes[:, state.prefix :], None
        if not state.whole:
            kept = places_of(state.there > 0, state.present)
            tables = {name: rows_of(table, kept) for name, table in tables.items()}
            sizes = sizes.gather(1, kept)
        first, merged = sizes.shape[1], None
        while (patches := sizes.shape[1]) > count:
            merging = self._round(state, tables, sizes, patches - count)
            tables = {name: merging.of(table) for name, table in tables.items()}
            merged = merging.into if patches == first else None  # of several rounds, any patch may be new
            sizes, kept = merging.sizes, merging.stay if kept is None else kept.gather(1, merging.stay)
        if kept is None:
            kept = torch.arange(first, device=sizes.device).expand(sizes.shape[0], -1)
        return Reduction(kept, self.finished(tables, merged), sizes=sizes)

    def _round(self, state: TokenState, tables: Tables, sizes: Float[Tensor, "batch patches"], most: int) -> "Round":
        features = self.features(tables, sizes)
        split = self.split(state, features, most)
        sides = {name: split.of(table) for name, table in features.items()}
        near, nearest = self.closeness(*({name: side[part] for name, side in sides.items()} for part in (0, 1))).max(-1)
        num_pruned = near.argsort(dim=1, descending=True, stable=True)[:, :most]
        return Round(sizes, *split.indices(num_pruned, nearest.gather(1, num_pruned)))


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
        """Returns what is left of a table."""
        rows = table.flatten(0, 1)
        left = rows.index_select(0, self._stay)
        moved = (rows.index_select(0, self._sources) - rows.index_select(0, self._goals)) * self._shares
        return left.index_add_(0, self.into, moved).view(*self.stay.shape, -1)


def places_of(there: Bool[Tensor, "batch patches"], present: int) -> Int[Tensor, "batch present"]:
    """Returns the places of the patches that are there, in order; of every image there are so many."""
    return there.to(torch.int32).argsort(dim=1, descending=True, stable=True)[:, :present]


def rows_of(
    table: Float[Tensor, "batch rows features"], chosen: Int[Tensor, "batch chosen"]
) -> Float[Tensor, "batch chosen features"]:
    """Returns some rows of every image."""
    # Whole rows are copied at once, which gather, element by element, does not do.
    image = torch.arange(chosen.shape[0], device=chosen.device)[:, None]
    rows = table.flatten(0, 1).index_select(0, (image * table.shape[1] + chosen).flatten())
    return rows.unflatten(0, chosen.shape)
