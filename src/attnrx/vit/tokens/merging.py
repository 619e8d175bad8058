"""Token merging by bipartite matching, in rounds: ToMe, and Ward, which changes the tokens the least."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from attnrx.support.errors import InvalidInput
from attnrx.support.shapes import Float, Int, Tensor
from attnrx.vit.kernels.native_attention import Merged, native_merge
from attnrx.vit.tokens.reducer import (
    Reducer,
    Reduction,
    Shape,
    TokenState,
    counted,
    first_best,
    gathered_rows,
    stable_order,
)

Tables = dict[str, Float[Tensor, "batch _ _"]]
Indices = Int[Tensor, "batch _"]
Side = slice | Indices  # one of the two sets of a round: a slice (a view, which is faster), or patch indices

ALTERNATING = slice(0, None, 2), slice(1, None, 2)


@dataclass(frozen=True)
class Merging(Reducer):
    """Merges by bipartite soft matching (ToMe, Bolya et al., 2023), for any similarity and any two sets.

    Patches are divided into two sets, alternately unless `split` is overridden. Every patch of the first set is matched
    with the most similar patch of the second. The most similar pairs are merged into means weighted by size. Later
    attention is proportional. A round can merge at most all patches of the first set. If more must be merged, more
    rounds follow.

    The similarity is the cosine of the keys, averaged over the heads. For another similarity, override `tables`,
    `features` and `closeness`, together with `needs` and `compared_width`.
    """

    proportional: ClassVar[bool] = True
    needs = ("keys",)

    def compared_width(self, shape: Shape) -> int:
        """Returns the number of features that are compared between two patches."""
        return shape.directions

    def tables(self, state: TokenState) -> Tables:
        """Returns the tensors to merge: the "patches", and the tensors from which `features` are computed."""
        assert state.keys is not None
        return {"patches": state.patches, "keys": state.keys[:, state.prefix :]}

    def first_tables(self, tables: Tables, features: Tables) -> Tables:
        """Returns the tables of the first round, plus further tables that are merged in the same way."""
        return tables

    def features(self, tables: Tables, sizes: Float[Tensor, "batch patches"] | None) -> Tables:
        """Returns the features that a round compares, one row per patch. If `sizes` is None, all sizes are 1."""
        return {"keys": nn.functional.normalize(tables["keys"], dim=-1)}

    def closeness(self, first: Tables, second: Tables) -> Float[Tensor, "batch first second"]:
        """Returns the similarity of every patch of the first set to every patch of the second."""
        return torch.bmm(first["keys"], second["keys"].transpose(1, 2))

    def split(self, state: TokenState, features: Tables, most: int) -> tuple[Side, Side]:
        """Divides a round's patches into two sets. Some may be in neither. At most `most` patches are merged."""
        return ALTERNATING

    def finished(self, tables: Tables) -> Float[Tensor, "batch patches width"]:
        """Returns the patches for the next layer."""
        return tables["patches"]

    def predictor_macs(self, shape: Shape, patches: int, count: int) -> int:
        """Returns the MACs for comparing the two sets in every round."""
        total = 0
        while patches > count:
            second = patches // 2
            total += (patches - second) * second * self.compared_width(shape)
            patches -= min(patches - second, patches - count)
        return total

    def reduce(self, state: TokenState, count: int, predictor: nn.Module) -> Reduction:
        """Merges until `count` patches remain."""
        # The tables shrink from round to round. `kept` are the indices of the patch tokens that the rows represent, and
        # `destinations` has the row of every patch. Masked patches are removed first, so they are in neither set.
        tables, sizes, kept, prefix = self.tables(state), state.sizes[:, state.prefix :], None, 0
        if not state.unmasked:
            # All keys differ, because OpenVINO does not sort stably. They are integers, as ONNX cannot sort booleans.
            order = torch.arange(sizes.shape[1], device=sizes.device, dtype=torch.int32)
            keys = torch.where(state.present_mask > 0, order, order + sizes.shape[1])
            kept = stable_order(keys, descending=False)[:, : state.num_present]
            tables = {name: gathered_rows(table, kept) for name, table in tables.items()}
            sizes = sizes.gather(1, kept)
        else:
            # A round also copies the tokens before the patches, which saves concatenating them afterwards.
            tables, sizes, prefix = {**tables, "patches": state.tokens}, state.sizes, state.prefix
        num_rows, present_indices, is_first = sizes.shape[1] - prefix, kept, True
        every_row = counted(0, num_rows, sizes.device).expand(sizes.shape[0], -1)
        destinations = every_row if state.tracked else None
        while (patches := sizes.shape[1] - prefix) > count:
            features = self.features(tables, None if state.unsized and is_first else sizes)
            tables = self.first_tables(tables, features) if is_first else tables
            compared = {name: last_rows(table, patches) for name, table in features.items()}
            first, second = self.split(state, compared, patches - count)
            rows = [{name: _rows_of(table, side) for name, table in compared.items()} for side in (first, second)]
            similarity, nearest = self.closeness(*rows).max(-1)
            sources = first_best(similarity, patches - count)
            merging = Round(sizes, _indices_in(first, sources, prefix), second, nearest.gather(1, sources), prefix)
            tables = {name: merging.of(table) for name, table in tables.items()}
            stay, is_first = merging.stay, False
            sizes, kept = merging.sizes, stay if kept is None else kept.gather(1, stay)
            destinations = None if destinations is None else merging.destinations.gather(1, destinations)
        if destinations is not None and present_indices is not None:  # pruned patches have no destination
            destinations = torch.full_like(state.patch_indices, -1).scatter(1, present_indices, destinations)
        tokens, kept = self.finished(tables), every_row if kept is None else kept
        whole = (tokens, sizes) if prefix else None
        return Reduction(kept, tokens[:, prefix:], sizes=sizes[:, prefix:], destinations=destinations, whole=whole)


class Round:
    """One round, which merges the patches at `sources` into the patches at the positions `goals` of the set `second`.

    The first `prefix` rows are tokens that are not patches. `destinations` [batch, patches] contains, for every patch,
    its index after the round, or the index of the patch into which it is merged. `stay` [batch, left] are the indices
    of the remaining patches. Every row has a weight in the mean of its destination. The weight is exactly 1 where
    nothing is merged.

    On a CPU, and in files written for one, the merged rows are added to the remaining rows. Elsewhere the means are one
    product, [left, rows] times the table. The product has the fewest operations, and launching operations takes most of
    the time for a small batch on a GPU. It also sums in a fixed order. In a file, however, quantizers treat a product
    as a layer, and round all tokens to the few numbers that they allow for a layer's input. Neither way counts as MACs.
    """

    def __init__(
        self, sizes: Float[Tensor, "batch rows"], sources: Indices, second: Side, goals: Indices, prefix: int = 0
    ):
        num_left, self._num_rows, self._prefix = sizes.shape[1] - sources.shape[1], sizes.shape[1], prefix
        # Integers, because TorchScript cannot scatter booleans. A row's index after the round, counted from 1, is the
        # number of remaining rows up to and including it.
        order = torch.ones_like(sizes, dtype=torch.int64).scatter_(1, sources, 0).cumsum(1)
        rows = counted(1, num_left + 1, sizes.device)[:, None]
        of_patches = order[:, prefix:]
        of_second = of_patches[:, second] if isinstance(second, slice) else of_patches.gather(1, second)
        numbers = of_second.gather(1, goals)
        self._numbers = order.scatter(1, sources, numbers)
        self._shares: Tensor | None = None
        # The r-th remaining row comes after all rows at which fewer than r have been counted.
        if sizes.device.type == "cpu":
            left = (order[:, None] < rows).sum(2, dtype=torch.int64)
            self.stay = left[:, prefix:] - prefix
            self._num_left, self._goals = num_left, numbers - 1
            # First the remaining rows, then the rows that are merged.
            self._rows = torch.cat([left, sources], dim=1)
            of_rows = sizes.gather(1, self._rows)
            self.sizes = of_rows[:, :num_left].scatter_add(1, self._goals, of_rows[:, num_left:])
            totals = torch.cat([self.sizes, self.sizes.gather(1, self._goals)], dim=1)
            self._weights = (of_rows / totals)[..., None]
        else:
            self.stay = (of_patches[:, None] < rows[prefix:]).sum(2, dtype=torch.int64)
            weights = sizes[:, None] * (self._numbers[:, None] == rows)
            total = weights.sum(2, keepdim=True)
            self.sizes, self._shares = total[..., 0], weights / total

    @property
    def destinations(self) -> Int[Tensor, "batch patches"]:
        return self._numbers[:, self._prefix :] - (1 + self._prefix)

    def of(self, table: Float[Tensor, "batch rows features"]) -> Float[Tensor, "batch left features"]:
        """Returns the merged rows of a table, which has all rows or only the patches' rows."""
        first = self._num_rows - table.shape[1]
        if self._shares is None:
            weighted = gathered_rows(table, self._rows[:, first:] - first) * self._weights[:, first:]
            left, merged = weighted.tensor_split([self._num_left - first], dim=1)
            # Not scattered into one flat list of rows, because ONNX Runtime sums into it in several threads at once.
            merged = left.scatter_add(1, (self._goals - first)[..., None].expand_as(merged), merged)
        else:
            # Not `@`, because it expands both sides to one batch size, which adds operations to a graph for any batch.
            shares = self._shares[:, first:, first:] if first else self._shares
            merged = torch.bmm(shares, table)
        # Under autocast, the product has a lower precision than the table. Sizes may have a higher one.
        return merged if merged.dtype == table.dtype else merged.to(table.dtype)


def last_rows(table: Float[Tensor, "batch rows *_"], count: int) -> Float[Tensor, "batch count *_"]:
    return table[:, table.shape[1] - count :]


def _rows_of(table: Float[Tensor, "batch patches _"], side: Side) -> Float[Tensor, "batch _ _"]:
    return table[:, side] if isinstance(side, slice) else gathered_rows(table, side)


def _indices_in(side: Side, positions: Indices, prefix: int) -> Indices:
    """Returns the rows of the table for these positions in a set of patches."""
    if not isinstance(side, slice):
        return side.gather(1, positions) + prefix
    rows, start = side.step * positions, side.start + prefix
    return rows + start if start else rows


@dataclass(frozen=True)
class ToMe(Merging):
    """Merges the patches that are most similar by the cosine of their mean keys over the heads (Bolya et al., 2023).

    Implemented from the paper (see `Merging`). After the first round, a merged patch is compared by the mean of its
    patches' keys, weighted by size. The paper merges a few patches in every layer, between attention and MLP, and never
    more than one round. Here merging comes before a layer (`tome:N@every` is the closest schedule).
    """

    name: ClassVar[str] = "tome"

    def native_merge(self, state: TokenState, count: int) -> Merged:
        return native_merge(state.tokens, state.sizes, state.patch_indices, state.keys, count)


@dataclass(frozen=True)
class Ward(Merging):
    """Merges the patches with the smallest increase of squared error (our method, with the criterion of Ward, 1963).

    Replacing a patch x of size a and a patch y of size b by their mean adds a b / (a + b) |x - y|^2 to the squared
    error of all tokens. Large groups are therefore merged late. The tokens themselves are compared, so no statistics of
    a layer are needed. With `lengths`, a merged token is rescaled to the mean norm of its patches. Otherwise the mean
    vector would be shorter, and the residual branches of later layers would weigh more.

    With a `relevance` r above 0, the sizes in the criterion are multiplied by 1 - r + r c. Here c is the attention that
    the class token pays to a patch in the previous layer, scaled to mean 1 over the patches. So errors of patches that
    the class token ignores cost less. The means are still weighted by the unchanged sizes.
    """

    lengths: bool = True
    relevance: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.relevance < 1:
            raise InvalidInput(f"relevance={self.relevance}: give a share from 0 to below 1, e.g. 0.3.")
        # Without relevance, patches are compared only by their tokens.
        object.__setattr__(self, "needs", ("class_attention",) if self.relevance else ())

    def compared_width(self, shape: Shape) -> int:
        return shape.width

    def tables(self, state: TokenState) -> Tables:
        tables = {"patches": state.patches}
        if not self.relevance:
            return tables
        # Stored relative to the sizes, because later rounds average the factors.
        factors = self._weights(state) / state.sizes.clamp_min(1)
        return {**tables, "factors": factors[:, state.prefix :, None]}

    def _weights(self, state: TokenState) -> Float[Tensor, "batch tokens"]:
        """Returns the weights of all tokens in the criterion, 0 for a masked token."""
        if not self.relevance:
            return state.sizes
        assert state.class_attention is not None
        received, prefix = state.class_attention.mean(1), state.prefix
        # The attention per patch of the image. A masked token receives none.
        total = (received / state.sizes.clamp_min(1))[:, prefix:].sum(1, keepdim=True)
        num_present = state.patches.shape[1] if state.unmasked else state.present_mask.sum(1, keepdim=True)
        return state.sizes * (1 - self.relevance) + received * (self.relevance * num_present / total)

    def native_merge(self, state: TokenState, count: int) -> Merged:
        tokens, sizes, indices = state.tokens, state.sizes, state.patch_indices
        return native_merge(tokens, sizes, indices, None, count, self.lengths, self._weights(state))

    def first_tables(self, tables: Tables, features: Tables) -> Tables:
        # The norms are a separate table. Merged like the patches, they become means weighted by size.
        return {**tables, "lengths": features["norms"]} if self.lengths else tables

    def features(self, tables: Tables, sizes: Float[Tensor, "batch patches"] | None) -> Tables:
        norms = tables["patches"].norm(dim=-1, keepdim=True)
        features = {"patches": tables["patches"], "norms": norms, "squares": norms.square()}
        weights = None if sizes is None else sizes[..., None]
        if "factors" in tables:
            factors = tables["factors"]
            weights = factors if weights is None else last_rows(weights, factors.shape[1]) * factors
        return features if weights is None else {**features, "inverse_weights": weights.reciprocal()}

    def closeness(self, first: Tables, second: Tables) -> Float[Tensor, "batch first second"]:
        """Returns half of the negative increase in squared error: |x|^2 + |y|^2 - 2 x y, divided by 1/a + 1/b."""
        squares = first["squares"] + second["squares"].transpose(1, 2)
        # x y - (|x|^2 + |y|^2) / 2, half of the negative squared distance: [batch, first, second].
        products = torch.bmm(first["patches"], second["patches"].transpose(1, 2))
        distances = torch.sub(products, squares, alpha=0.5)
        # Rounding can make the squared distance of equal patches negative.
        distances = distances.clamp_max(0)
        if "inverse_weights" not in first:
            return distances
        return distances / (first["inverse_weights"] + second["inverse_weights"].transpose(1, 2))

    def finished(self, tables: Tables) -> Float[Tensor, "batch patches width"]:
        """Returns the patches, rescaled to their stored norms if there are any."""
        patches = tables["patches"]
        if "lengths" not in tables:
            return patches
        # A mean of opposite patches can be zero, and then stays zero.
        return patches * (tables["lengths"] / patches.norm(dim=-1, keepdim=True).clamp_min(1e-6))
