"""The token reducer SPOT, whose predictor reads token features, attention, and how attention varies over the layers."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from attnrx.support.errors import InvalidInput
from attnrx.support.shapes import Float, Int, Tensor
from attnrx.vit.tokens import LayerStatistic, Shape, TokenState
from attnrx.vit.tokens.reducer import PerPatch
from attnrx_lab.tokens.learned_scores import KeepDrop, KeepScores, Predicting, TokenFeatures

SCALARS = 6  # attention features per patch, head and map (SPOT, Eqs. 3 to 9)


@dataclass
class MapMoments(LayerStatistic):
    """The elementwise mean of the attention maps over the layers so far, and optionally their variance.

    The class stores only the sum of the maps and, for the variance, the sum of their squares. So memory does not grow
    with the number of layers. Attention lies in [0, 1], so sums of squares are accurate enough for a predictor. In
    float32, a standard deviation that is 1 % of the mean attention is accurate to three digits.
    """

    total: Float[Tensor, "batch heads queries keys"]
    squares: Float[Tensor, "batch heads queries keys"] | None = None
    count: int = 1

    @classmethod
    def of(cls, attention: Float[Tensor, "batch heads queries keys"], variance: bool = True) -> "MapMoments":
        """Returns the moments of only the first layer's attention."""
        return cls(attention, attention * attention if variance else None)

    def add_layer(self, attention: Float[Tensor, "batch heads queries keys"]) -> "MapMoments":
        """Returns the moments that also include this attention. If gradients are off, the sums are updated in place."""
        squares = self.squares
        if torch.is_grad_enabled() or self.count == 1:  # the first sum shares memory with the map of the first layer
            total = self.total + attention
            squares = None if squares is None else torch.addcmul(squares, attention, attention)
        else:
            total = self.total.add_(attention)
            squares = None if squares is None else squares.addcmul_(attention, attention)
        return MapMoments(total, squares, self.count + 1)

    def at(self, kept: Int[Tensor, "batch kept"], num_new: int = 0) -> "MapMoments":
        """Returns the moments for the kept tokens, and for `num_new` new tokens after them, whose sums are zero."""
        moments = self._map(lambda sums: _between(sums, kept))
        return moments._map(lambda sums: F.pad(sums, (0, num_new, 0, num_new))) if num_new else moments

    def without(self, indices: Int[Tensor, "batch removed"]) -> "MapMoments":
        """Returns the moments with the sums of these tokens set to zero, for use after new tokens replaced them."""
        # The sums are copied, because they may be in an autograd graph or share memory with the first layer's map.
        mask = torch.ones_like(self.total[:, 0, :, 0]).scatter(1, indices, 0.0)
        pair_mask = (mask[:, :, None] * mask[:, None, :])[:, None]
        return self._map(lambda sums: sums * pair_mask)

    def _map(self, function: Callable[[Tensor], Tensor]) -> "MapMoments":
        squares = None if self.squares is None else function(self.squares)
        return MapMoments(function(self.total), squares, self.count)

    @property
    def mean(self) -> Float[Tensor, "batch heads queries keys"]:
        return self.total / self.count

    @property
    def variance(self) -> Float[Tensor, "batch heads queries keys"]:
        """The variance over the layers (the mean of the squared deviations), if it was collected."""
        assert self.squares is not None
        if self.count == 1:  # exactly 0, without rounding
            return torch.zeros_like(self.squares)
        # E x^2 - (E x)^2. If the maps are almost equal, rounding can make it negative.
        mean_square = self.squares / self.count
        return torch.addcmul(mean_square, self.total, self.total, value=-1 / self.count**2).clamp_(min=0)


def _between(maps: Float[Tensor, "batch heads queries keys"], kept: Int[Tensor, "batch kept"]) -> Tensor:
    """Returns the maps with only the rows and columns of the kept tokens."""
    # Rows come first, because the columns are then gathered from the smaller [batch, heads, kept, keys].
    batch, heads, queries, keys = maps.shape
    # index_select copies whole rows, but gather copies element by element.
    first = torch.arange(batch * heads, device=maps.device).view(batch, heads, 1) * queries
    rows = maps.reshape(-1, keys).index_select(0, (first + kept[:, None, :]).flatten()).view(batch, heads, -1, keys)
    return rows.gather(3, kept[:, None, None, :].expand(-1, heads, kept.shape[1], -1))


@dataclass(frozen=True)
class Spot(Predicting):
    """Keeps the patches that a learned predictor selects, based on token features, attention and its dynamics.

    The class implements SPOT, Section 3.2. Every attention map yields six scalars per head and patch (SPOT, Eqs. 3 to
    9). The maps are the attention of the previous layer and, with `mean` and `variance`, the mean and the variance of
    attention over all previous layers. `projected` is the number of additional token features, half local and half
    global. None means the model width, and 0 means no token features. With `head_averaged`, the maps are averaged over
    the heads first. With `shared`, all stages share one predictor. The paper's Table 2, Figure 5 and Table 8 vary these
    settings one at a time. `standardized` is not in the paper. It scales every attention feature to mean 0 and variance
    1 over the patches of an image. Without this scaling, attention features are 10 to 10^5 times smaller than token
    features.

    In training, the gradient of a dropped patch's mask is bounded as in `DynamicViT`.
    """

    mean: bool = True
    variance: bool = True
    projected: int | None = None
    head_averaged: bool = False
    shared: bool = False
    standardized: bool = False

    needs = ("attention", "class_attention")

    def __post_init__(self):
        super().__post_init__()
        if self.projected is not None and self.projected < 0:
            raise InvalidInput(f"{self}: projected counts token features; give 0 or more, or None for the width.")
        object.__setattr__(self, "every_layer", "attention" if self.mean or self.variance else "")
        object.__setattr__(self, "one_predictor", self.shared)

    def add_layer(self, before: MapMoments | None, observed: Float[Tensor, "batch heads queries keys"]) -> MapMoments:
        return MapMoments.of(observed, self.variance) if before is None else before.add_layer(observed)

    def features(self, shape: Shape) -> tuple[int, int]:
        """Returns the number of token features and the number of attention features per patch."""
        maps = 1 + self.mean + self.variance
        heads = 1 if self.head_averaged else shape.heads
        return shape.width if self.projected is None else self.projected, SCALARS * maps * heads

    def predictor(self, shape: Shape) -> nn.Module:
        return SpotPredictor(self, shape)

    def predictor_macs(self, shape: Shape, patches: int, count: int) -> int:
        projected, attention = self.features(shape)
        return patches * shape.width * projected + KeepScores.macs(projected + attention, patches)


class SpotPredictor(nn.Module):
    """Predicts the log-probabilities of keep and drop from token and attention features (SPOT, Eq. 10)."""

    def __init__(self, spot: Spot, shape: Shape):
        super().__init__()
        self.spot = spot
        projected, attention = spot.features(shape)
        self.tokens = TokenFeatures(shape.width, projected) if projected else None
        self.scores = KeepScores(projected + attention)

    def forward(self, state: TokenState) -> KeepDrop:
        parts = [] if self.tokens is None else [self.tokens(state.patches, state.present_mask)]
        assert state.attention is not None
        parts.append(self._features(state, state.attention))
        return self.scores(torch.cat(parts, dim=-1))

    def _features(
        self, state: TokenState, attention: Float[Tensor, "batch heads tokens tokens"]
    ) -> Float[Tensor, "batch patches features"]:
        """Returns the attention features of the patches."""
        maps, moments = [attention], state.statistic
        assert moments is None or isinstance(moments, MapMoments)
        if moments is not None and self.spot.mean:
            maps.append(moments.mean)
        if moments is not None and self.spot.variance:
            maps.append(moments.variance)
        if self.spot.head_averaged:
            maps = [table.mean(1, keepdim=True) for table in maps]
        # All maps are concatenated as heads of one map, because few large operations are faster than many small ones.
        present_mask = None if state.unmasked else state.present_mask
        return attention_features(torch.cat(maps, dim=1), state.prefix, present_mask, self.spot.standardized)


def attention_features(
    attention: Float[Tensor, "batch heads tokens tokens"],
    prefix: int,
    present_mask: PerPatch | None = None,
    standardized: bool = False,
) -> Float[Tensor, "batch patches features"]:
    """Returns six scalars for every patch and head, computed over the remaining patches (SPOT, Eqs. 3 to 8).

    The first two scalars are the attention that the patch gets from the class token and pays to it. The next two are
    the mean and variance of the attention that it pays to the patches. The last two are the mean and variance of the
    attention that it gets from them. The scalars of all heads are concatenated.
    """
    inner = attention[:, :, prefix:, prefix:]  # between patches, so the rows no longer sum to 1
    rows = columns = inner
    count: Tensor | int = inner.shape[-1]
    if present_mask is not None:
        # Rows are summed over the remaining keys, and columns over the remaining queries.
        rows, columns = inner * present_mask[:, None, None, :], inner * present_mask[:, None, :, None]
        count = present_mask.sum(1)[:, None, None]
    row_squares = rows * inner  # the mask is 0 or 1, so this equals the square of the masked rows
    column_squares = row_squares if present_mask is None else columns * inner
    sums = rows.sum(3), columns.sum(2), row_squares.sum(3), column_squares.sum(2)
    row_mean, column_mean, row_square, column_square = (part / count for part in sums)
    # The mean of squares minus the square of the mean needs one pass over a map less than squared deviations do.
    row_variance = (row_square - row_mean.square()).clamp(min=0)
    column_variance = (column_square - column_mean.square()).clamp(min=0)
    with_class = attention[:, :, 0, prefix:], attention[:, :, prefix:, 0]
    scalars = (*with_class, row_mean, row_variance, column_mean, column_variance)
    # From [batch, heads, patches, 6] to [batch, patches, heads * 6].
    features = torch.stack(scalars, dim=-1).permute(0, 2, 1, 3).flatten(2)
    if not standardized:
        return features
    # A variance is a difference of squares, so its rounding error grows with the squares.
    sizes = (*with_class, row_mean, row_square, column_mean, column_square)
    return standardized_features(features, torch.stack(sizes, dim=-1).permute(0, 2, 1, 3).flatten(2), present_mask)


def standardized_features(
    features: Float[Tensor, "batch patches features"],
    sizes: Float[Tensor, "batch patches features"],
    present_mask: PerPatch | None,
) -> Float[Tensor, "batch patches features"]:
    """Returns features with mean 0 and variance 1 over the remaining patches of every image.

    `sizes` are the magnitudes of the numbers that each feature was computed from. If a feature's standard deviation is
    no larger than the rounding error of these numbers, the feature becomes 0. No gradient flows through the deviation.
    """
    precision = 100 * torch.finfo(features.dtype).eps
    exact = features.to(torch.promote_types(features.dtype, torch.float32))  # squares of variances reach 1e-20
    mask = torch.ones_like(exact[..., :1]) if present_mask is None else present_mask[..., None].to(exact.dtype)
    count = mask.sum(1, keepdim=True)
    centred = exact - (exact * mask).sum(1, keepdim=True) / count
    deviation = ((centred.detach() * mask).square().sum(1, keepdim=True) / count.detach()).sqrt()
    varies = deviation > precision * (sizes.detach().abs() * mask).sum(1, keepdim=True) / count.detach()
    # Features of pruned patches can be arbitrarily large, so mask them.
    return (centred / torch.where(varies, deviation, 1.0) * varies * mask).to(features.dtype)
