"""Token merging by bipartite matching, in rounds; ToMe."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from attnrx.support.modules import is_traced
from attnrx.support.shapes import Bool, Float, Int, Tensor
from attnrx.vit.kernels.native_merging import Merged, native_merge
from attnrx.vit.tokens.reducer import Reducer, Reduction, Shape, stable_order
from attnrx.vit.tokens.state import TokenState, gathered_rows

Tables = dict[str, Float[Tensor, "batch _ _"]]
Indices = Int[Tensor, "batch _"]
Side = slice | Indices  # one of the two sets of a round: a slice, which is a view and faster, or patch indices

ALTERNATING = slice(0, None, 2), slice(1, None, 2)


@dataclass(frozen=True)
class Merging(Reducer):
    """Merges by bipartite soft matching (ToMe, Bolya et al., 2023), for any similarity and any two sets.

    Patches are divided into two sets, alternately unless `split` is overridden. Every patch of the first set is matched
    with the most similar patch of the second, and the most similar pairs are merged into means weighted by size. Later
    attention is proportional. A round merges at most one of the sets; more rounds follow where more must be merged.

    The similarity is the cosine of the mean keys over the heads, unless `tables`, `features` and `closeness` are
    overridden, with `needs` and `compared_width`.
    """

    proportional: ClassVar[bool] = True
    needs = ("keys",)

    def compared_width(self, shape: Shape) -> int:
        """Returns the number of features by which two patches are compared."""
        return shape.directions

    def tables(self, state: TokenState) -> Tables:
        """Returns the tensors that are merged: the "patches", and the tensors by which patches are compared."""
        assert state.keys is not None
        return {"patches": state.patches, "keys": state.keys[:, state.prefix :]}

    def first_tables(self, tables: Tables) -> Tables:
        """Returns the tables of the first round, with further ones that are merged along."""
        return tables

    def features(self, tables: Tables, sizes: Float[Tensor, "batch patches"]) -> Tables:
        """Returns the features by which patches are compared in one round, one row per patch."""
        return {"keys": nn.functional.normalize(tables["keys"], dim=-1)}

    def closeness(self, first: Tables, second: Tables) -> Float[Tensor, "batch first second"]:
        """Returns the similarity of every patch of the first set to every one of the second."""
        return first["keys"] @ second["keys"].transpose(1, 2)

    def split(self, state: TokenState, features: Tables, most: int) -> tuple[Side, Side]:
        """Divides the patches of one round, of which at most `most` are merged; others are in neither set."""
        return ALTERNATING

    def finished(self, tables: Tables) -> Float[Tensor, "batch patches width"]:
        """Returns the patches for the next layer."""
        return tables["patches"]

    def predictor_macs(self, shape: Shape, patches: int, count: int) -> int:
        """Returns the MACs of comparing the two sets in every round."""
        total = 0
        while patches > count:
            second = patches // 2
            total += (patches - second) * second * self.compared_width(shape)
            patches -= min(patches - second, patches - count)
        return total

    def reduce(self, state: TokenState, count: int, predictor: nn.Module) -> Reduction:
        """Merges until `count` patches remain."""
        # The tables shrink from round to round. `kept` are the patch tokens of the state that the rows stand for, and
        # `destinations` the row of every patch. Masked patches are removed first: they are in neither set of a round.
        tables, sizes, kept = self.tables(state), state.sizes[:, state.prefix :], None
        if not state.unmasked:
            kept = indices_of(state.present_mask > 0, state.num_present)
            tables = {name: gathered_rows(table, kept) for name, table in tables.items()}
            sizes = sizes.gather(1, kept)
        tables, num_rows = self.first_tables(tables), sizes.shape[1]
        present_indices = kept
        destinations = torch.arange(num_rows, device=sizes.device).expand(sizes.shape[0], -1) if state.tracked else None
        while (patches := sizes.shape[1]) > count:
            merging = self._round(state, tables, sizes, patches - count)
            tables = {name: merging.of(table) for name, table in tables.items()}
            stay = merging.stay
            sizes, kept = merging.sizes, stay if kept is None else kept.gather(1, stay)
            destinations = None if destinations is None else merging.destinations.gather(1, destinations)
        if kept is None:
            kept = torch.arange(num_rows, device=sizes.device).expand(sizes.shape[0], -1)
        if destinations is not None and present_indices is not None:  # pruned patches have none
            destinations = torch.full_like(state.patch_indices, -1).scatter(1, present_indices, destinations)
        return Reduction(kept, self.finished(tables), sizes=sizes, destinations=destinations)

    def _round(self, state: TokenState, tables: Tables, sizes: Float[Tensor, "batch patches"], most: int) -> "Round":
        features = self.features(tables, sizes)
        first, second = self.split(state, features, most)
        rows = [{name: _rows_of(table, side) for name, table in features.items()} for side in (first, second)]
        similarity, nearest = self.closeness(*rows).max(-1)
        # Stable: of equal similarities the first patch is merged, on every device.
        sources = stable_order(similarity)[:, :most]
        return Round(sizes, _indices_in(first, sources), _indices_in(second, nearest.gather(1, sources)))


class Round:
    """One round: patches at `sources` are merged into those at `goals`.

    `destinations` [batch, patches] is the index after the round of every patch, or of the one that it is merged into.
    Every patch has a weight in the mean of its destination, which is exactly 1 where nothing is merged.
    """

    def __init__(self, sizes: Float[Tensor, "batch patches"], sources: Indices, goals: Indices):
        num_left = sizes.shape[1] - sources.shape[1]
        # Integers, because TorchScript cannot scatter booleans, and ONNX cannot sum them.
        self._remains = torch.ones_like(sizes, dtype=torch.int64).scatter(1, sources, 0)
        # The number of remaining patches up to one is its index after the round, counted from 1.
        order = self._remains.cumsum(1)
        self._numbers = order.scatter(1, sources, order.gather(1, goals))
        self._shares: Tensor | None = None
        if is_traced():
            rows = torch.arange(1, num_left + 1, device=sizes.device)[:, None]
            weights = sizes[:, None] * (self._numbers[:, None] == rows)
            total = weights.sum(2, keepdim=True)
            self.sizes, self._shares = total[..., 0], weights / total
        else:
            destinations = self.destinations
            self.sizes = sizes.new_zeros(len(sizes), num_left).scatter_add(1, destinations, sizes)
            self._weights = (sizes / self.sizes.gather(1, destinations))[..., None]

    @property
    def stay(self) -> Int[Tensor, "batch left"]:
        """The indices of the patches that are left."""
        return indices_of(self._remains > 0, self.sizes.shape[1])

    @property
    def destinations(self) -> Int[Tensor, "batch patches"]:
        return self._numbers - 1

    def of(self, table: Float[Tensor, "batch patches features"]) -> Float[Tensor, "batch left features"]:
        """Returns the merged rows of a table."""
        if self._shares is None:
            weighted = self._weights * table
            sums = weighted.new_zeros(*self.sizes.shape, table.shape[-1])
            merged = sums.scatter_add(1, self.destinations[..., None].expand_as(weighted), weighted)
        else:
            # In a graph one product, [left, patches] times the table: the fewest operations, whose start takes most of
            # the time of a small batch. It is not counted as MACs, which are those of the sums above.
            merged = self._shares @ table
        # Under autocast the product has a lower precision than the table, sizes may have a higher one.
        return merged if merged.dtype == table.dtype else merged.to(table.dtype)


def _rows_of(table: Float[Tensor, "batch patches _"], side: Side) -> Float[Tensor, "batch _ _"]:
    return table[:, side] if isinstance(side, slice) else gathered_rows(table, side)


def _indices_in(side: Side, positions: Indices) -> Indices:
    """Returns the patch indices of these positions in a set."""
    if not isinstance(side, slice):
        return side.gather(1, positions)
    return side.step * positions + side.start if side.start else side.step * positions


def indices_of(present_mask: Bool[Tensor, "batch patches"], num_present: int) -> Int[Tensor, "batch present"]:
    """Returns the indices of the remaining patches, in order; after them those of others, in images of fewer."""
    # Different keys, because OpenVINO does not sort stably; integers, because ONNX cannot sort booleans.
    positions = torch.arange(present_mask.shape[1], device=present_mask.device, dtype=torch.int32)
    keys = torch.where(present_mask, positions, positions + present_mask.shape[1])
    return stable_order(keys, descending=False)[:, :num_present]


@dataclass(frozen=True)
class ToMe(Merging):
    """Merges the patches that are most similar by the cosine of their mean keys over the heads (Bolya et al., 2023).

    Implemented from the paper; see `Merging`. After the first round patches are compared by the means of the merged
    patches' keys, weighted by size. As published a few patches are merged in every layer, between attention and MLP,
    never more than one round; here it is before a layer (`tome:N@every` is the closest schedule).
    """

    def native_merge(self, state: TokenState, count: int) -> Merged:
        return native_merge(state.tokens, state.sizes, state.patch_indices, state.keys, count)
