"""Token merging by bipartite matching: ToMe, and Ward, which merges the pairs with the smallest squared error."""

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
Side = slice | Indices  # one of the two sets of patches in a round, as patch indices or as a slice (a faster view)

ALTERNATING = slice(0, None, 2), slice(1, None, 2)


@dataclass(frozen=True)
class Merging(Reducer):
    """Base class of reducers that merge patches by bipartite soft matching (ToMe, Bolya et al., 2023).

    A round divides the patches into two sets, by default the patches at even and at odd positions (see `split`). It
    matches every patch in the first set with the most similar patch in the second, and replaces the most similar pairs
    by their size-weighted means. One round can remove at most the patches of the first set, so removing more patches
    takes several rounds. In later layers, the attention weights every token by its size, the number of image patches
    that it represents.

    Patches are compared by the cosine of their keys, averaged over the heads. To use another similarity, override
    `tables`, `features` and `closeness`, together with `needs` and `compared_width`.
    """

    proportional: ClassVar[bool] = True
    needs = ("keys",)

    def compared_width(self, shape: Shape) -> int:
        """Returns the number of features by which two patches are compared. `predictor_macs` needs this number."""
        return shape.directions

    def tables(self, state: TokenState) -> Tables:
        """Returns the tensors whose rows are merged in every round: "patches", and the inputs of `features`."""
        assert state.keys is not None
        return {"patches": state.patches, "keys": state.keys[:, state.prefix :]}

    def first_tables(self, tables: Tables, features: Tables) -> Tables:
        """Returns the tables for the first round. A subclass can add tables that it computes from `features`."""
        return tables

    def features(self, tables: Tables, sizes: Float[Tensor, "batch patches"] | None) -> Tables:
        """Returns the features by which a round compares patches, one row per patch.

        If `sizes` is None, all patches have size 1.
        """
        return {"keys": nn.functional.normalize(tables["keys"], dim=-1)}

    def closeness(self, first: Tables, second: Tables) -> Float[Tensor, "batch first second"]:
        """Returns the similarity between every patch in the first set and every patch in the second set."""
        return torch.bmm(first["keys"], second["keys"].transpose(1, 2))

    def split(self, state: TokenState, features: Tables, most: int) -> tuple[Side, Side]:
        """Returns the two sets of patches for a round that merges at most `most` patches.

        A patch that is in neither set stays unchanged.
        """
        return ALTERNATING

    def finished(self, tables: Tables) -> Float[Tensor, "batch patches width"]:
        """Returns the patches that the next layer processes, from the tables after the last round."""
        return tables["patches"]

    def predictor_macs(self, shape: Shape, patches: int, count: int) -> int:
        """Returns the MACs of the comparisons between the two sets of patches, summed over all rounds."""
        total = 0
        while patches > count:
            second = patches // 2
            total += (patches - second) * second * self.compared_width(shape)
            patches -= min(patches - second, patches - count)
        return total

    def reduce(self, state: TokenState, count: int, predictor: nn.Module) -> Reduction:
        """Merges patches in rounds until `count` remain."""
        # Each round shrinks the tables. `kept` maps each remaining row to its patch token, and `destinations` maps
        # every patch to the row that represents it. Masked patches are removed before the first round.
        tables, sizes, kept, prefix = self.tables(state), state.sizes[:, state.prefix :], None, 0
        if not state.unmasked:
            # OpenVINO's sort is not stable, so all sort keys must differ. ONNX cannot sort booleans, so they are
            # integers.
            order = torch.arange(sizes.shape[1], device=sizes.device, dtype=torch.int32)
            keys = torch.where(state.present_mask > 0, order, order + sizes.shape[1])
            kept = stable_order(keys, descending=False)[:, : state.num_present]
            tables = {name: gathered_rows(table, kept) for name, table in tables.items()}
            sizes = sizes.gather(1, kept)
        else:
            # The tables include the prefix tokens, so they need not be concatenated after merging.
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
    """One merging round, in which the patches at the rows `sources` are merged into other patches.

    Source i is merged into the patch at position `goals[i]` in the set `second`. The first `prefix` rows are tokens
    that are not patches, e.g. the class token. `stay` [batch, left] contains the indices of the patches that remain
    after the round. For each patch, `destinations` [batch, patches] contains the new index of the patch that represents
    it. Merging computes weighted means of a table's rows. A row that is merged with no other row has a weight of
    exactly 1, so it does not change.

    On a CPU and in exported files, the weighted source rows are added to the remaining rows. On other devices, all
    means are computed as one product of a weight matrix [left, rows] and the table. The product adds the rows in a
    fixed order. It also launches fewer kernels than separate additions, which matters for small batches on a GPU.
    Exported files do not contain the product, because quantizers would treat it as a linear layer and quantize all
    tokens as its input. attnrx's MACs include neither variant.
    """

    def __init__(
        self, sizes: Float[Tensor, "batch rows"], sources: Indices, second: Side, goals: Indices, prefix: int = 0
    ):
        num_left, self._num_rows, self._prefix = sizes.shape[1] - sources.shape[1], sizes.shape[1], prefix
        # `order` counts the remaining rows up to and including each row. For a remaining row, this is its index after
        # the round, counted from 1. TorchScript cannot scatter booleans, so integers are used.
        order = torch.ones_like(sizes, dtype=torch.int64).scatter_(1, sources, 0).cumsum(1)
        rows = counted(1, num_left + 1, sizes.device)[:, None]
        of_patches = order[:, prefix:]
        of_second = of_patches[:, second] if isinstance(second, slice) else of_patches.gather(1, second)
        numbers = of_second.gather(1, goals)
        self._numbers = order.scatter(1, sources, numbers)
        self._shares: Tensor | None = None
        # The index of the r-th remaining row is the number of rows whose `order` is below r.
        if sizes.device.type == "cpu":
            left = (order[:, None] < rows).sum(2, dtype=torch.int64)
            self.stay = left[:, prefix:] - prefix
            self._num_left, self._goals = num_left, numbers - 1
            # `_rows` contains the remaining rows, followed by the rows that are merged into them.
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
        """Returns a table after merging its rows. The given table has rows for all tokens, or only for the patches."""
        first = self._num_rows - table.shape[1]
        if self._shares is None:
            weighted = gathered_rows(table, self._rows[:, first:] - first) * self._weights[:, first:]
            left, merged = weighted.tensor_split([self._num_left - first], dim=1)
            # A scatter into a flat list of rows would be unsafe, because ONNX Runtime sums into it in several threads
            # at once.
            merged = left.scatter_add(1, (self._goals - first)[..., None].expand_as(merged), merged)
        else:
            # `@` would expand both sides to a common batch size, which adds operations to graphs for any batch size.
            shares = self._shares[:, first:, first:] if first else self._shares
            merged = torch.bmm(shares, table)
        # Under autocast, the result has a lower precision than the table. With float32 sizes, it may have a higher one.
        return merged if merged.dtype == table.dtype else merged.to(table.dtype)


def last_rows(table: Float[Tensor, "batch rows *_"], count: int) -> Float[Tensor, "batch count *_"]:
    return table[:, table.shape[1] - count :]


def _rows_of(table: Float[Tensor, "batch patches _"], side: Side) -> Float[Tensor, "batch _ _"]:
    return table[:, side] if isinstance(side, slice) else gathered_rows(table, side)


def _indices_in(side: Side, positions: Indices, prefix: int) -> Indices:
    """Converts positions in a set of patches to row indices in a table that starts with `prefix` other rows."""
    if not isinstance(side, slice):
        return side.gather(1, positions) + prefix
    rows, start = side.step * positions, side.start + prefix
    return rows + start if start else rows


@dataclass(frozen=True)
class ToMe(Merging):
    """Merges the patches with the largest cosine similarity of their head-averaged keys (ToMe, Bolya et al., 2023).

    attnrx implements ToMe from the paper (see `Merging`), with two differences. First, attnrx merges patches before a
    layer, while the paper merges them between attention and MLP. Second, attnrx may merge in several rounds, while the
    paper merges a few patches in one round per layer. In later rounds, a merged patch is compared by the size-weighted
    mean of its patches' keys. The policy `tome:N@every` is closest to the paper's schedule.
    """

    name: ClassVar[str] = "tome"

    def native_merge(self, state: TokenState, count: int) -> Merged:
        return native_merge(state.tokens, state.sizes, state.patch_indices, state.keys, count)


@dataclass(frozen=True)
class Ward(Merging):
    """Merges the pairs of patches that increase the squared error least (our method, with Ward's criterion of 1963).

    Replacing a patch x of size a and a patch y of size b by their mean adds a b / (a + b) |x - y|^2 to the squared
    error of all tokens. Large groups are therefore merged late. The criterion compares tokens directly and needs no
    attention or keys. If `lengths` is true, a merged token is rescaled to the mean norm of its patches. Otherwise, the
    mean would have a smaller norm than the patches, and the residual branches of later layers would get too much
    influence.

    With a `relevance` r above 0, the criterion multiplies a patch's size by 1 - r + r c. Here c is the class token's
    attention to the patch in the previous layer, divided by the mean attention over the patches. Errors in patches that
    the class token ignores then count less than other errors. The means still use the unchanged sizes as weights.
    """

    lengths: bool = True
    relevance: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.relevance < 1:
            raise InvalidInput(f"relevance={self.relevance}: give a share from 0 to below 1, e.g. 0.3.")
        # If relevance is 0, patches are compared only by their tokens, so no attention is needed.
        object.__setattr__(self, "needs", ("class_attention",) if self.relevance else ())

    def compared_width(self, shape: Shape) -> int:
        return shape.width

    def tables(self, state: TokenState) -> Tables:
        tables = {"patches": state.patches}
        if not self.relevance:
            return tables
        # Factors are stored relative to the sizes, because later rounds average them.
        factors = self._weights(state) / state.sizes.clamp_min(1)
        return {**tables, "factors": factors[:, state.prefix :, None]}

    def _weights(self, state: TokenState) -> Float[Tensor, "batch tokens"]:
        """Returns each token's weight in Ward's criterion, which is 0 for masked tokens."""
        if not self.relevance:
            return state.sizes
        assert state.class_attention is not None
        received, prefix = state.class_attention.mean(1), state.prefix
        # `total` sums the attention per original patch. Masked tokens receive no attention.
        total = (received / state.sizes.clamp_min(1))[:, prefix:].sum(1, keepdim=True)
        num_present = state.patches.shape[1] if state.unmasked else state.present_mask.sum(1, keepdim=True)
        return state.sizes * (1 - self.relevance) + received * (self.relevance * num_present / total)

    def native_merge(self, state: TokenState, count: int) -> Merged:
        tokens, sizes, indices = state.tokens, state.sizes, state.patch_indices
        return native_merge(tokens, sizes, indices, None, count, self.lengths, self._weights(state))

    def first_tables(self, tables: Tables, features: Tables) -> Tables:
        # Norms are merged like the patches, so they become size-weighted means of the original norms.
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
        """Returns minus half the increase in squared error that merging each pair would cause.

        The increase is |x - y|^2 / (1/a + 1/b) for patches x and y of sizes a and b.
        """
        squares = first["squares"] + second["squares"].transpose(1, 2)
        # Minus half the squared distance is x y - (|x|^2 + |y|^2) / 2, [batch, first, second].
        products = torch.bmm(first["patches"], second["patches"].transpose(1, 2))
        distances = torch.sub(products, squares, alpha=0.5)
        # Rounding could give equal patches a negative squared distance.
        distances = distances.clamp_max(0)
        if "inverse_weights" not in first:
            return distances
        return distances / (first["inverse_weights"] + second["inverse_weights"].transpose(1, 2))

    def finished(self, tables: Tables) -> Float[Tensor, "batch patches width"]:
        """Returns the merged patches, rescaled to the mean norms of their original patches if `lengths` is true."""
        patches = tables["patches"]
        if "lengths" not in tables:
            return patches
        # The mean of opposite patches can be zero and cannot be rescaled, so it stays zero.
        return patches * (tables["lengths"] / patches.norm(dim=-1, keepdim=True).clamp_min(1e-6))
