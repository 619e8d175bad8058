"""Token relevance: the attention that every patch receives in each layer, and its noise.

Token reducers keep the patches of the highest relevance. Section 8 of the SPOT paper models the relevance in one layer
as the true relevance of the patch plus noise of variance sigma^2, weakly correlated between layers, so that the mean
over l layers has the variance sigma^2 / l. The functions below measure both assumptions: the variance, and the
correlation.
"""

from collections import defaultdict

import torch

from attnrx.errors import InvalidInput
from attnrx.observation import Observation
from attnrx.shapes import Bool, Float, Tensor
from attnrx.tokens import TokenLayout
from attnrx.tokens.reducer import best

CLASS_ATTENTION, RECEIVED = "class_attention", "attention_received"


class RelevanceWatch:
    """Stores the relevance of every patch in every layer, averaged over its heads; memory grows with the images.

    "class_attention" is the attention of the class token to a patch, if there is one, and "attention_received" that of
    all tokens together: the scores of the reducers of these names while no token is pruned.
    """

    def __init__(self, layout: TokenLayout, depth: int):
        self.layout, self.depth = layout, depth
        self._seen: dict[str, list[list[Tensor]]] = defaultdict(lambda: [[] for _ in range(depth)])

    def observe(self, layer: int, observation: Observation) -> None:
        maps = observation.attention[..., self.layout.prefix :].detach()
        if self.layout.class_token:
            self._seen[CLASS_ATTENTION][layer].append(maps[:, :, 0].mean(1).double().cpu())
        self._seen[RECEIVED][layer].append(maps.sum(2).mean(1).double().cpu())

    def relevance(self) -> dict[str, Float[Tensor, "images layers patches"]]:
        """Returns the relevance by source; NaN in a layer that computed nothing."""
        found = {}
        for name, layers in self._seen.items():
            known = next(torch.cat(batches) for batches in layers if batches)
            found[name] = torch.stack([torch.cat(own) if own else known * torch.nan for own in layers], dim=1)
        return found


def running_mean(relevance: Float[Tensor, "*more layers patches"]) -> Float[Tensor, "*more layers patches"]:
    """Returns the mean over layers 1..l for every l (Section 8); unknown layers are excluded."""
    known = ~relevance.isnan()
    return relevance.nan_to_num(0.0).cumsum(-2) / known.cumsum(-2)


def kept(relevance: Float[Tensor, "*more patches"], count: int) -> Bool[Tensor, "*more patches"]:
    """Returns the patches that a reducer keeps by this relevance: the `count` highest; ties go to the first."""
    if not 1 <= count <= relevance.shape[-1]:
        raise InvalidInput(f"{count} patches of {relevance.shape[-1]} to keep: give 1 to {relevance.shape[-1]}.")
    flat = relevance.reshape(-1, relevance.shape[-1])
    selected = best(flat, torch.ones_like(flat), count)
    return torch.zeros_like(flat, dtype=torch.bool).scatter(1, selected, True).view(relevance.shape)


def overlap(first: Bool[Tensor, "*more patches"], second: Bool[Tensor, "*more patches"]) -> Float[Tensor, "*more"]:
    """Returns the share of the patches of the smaller set that are in both; by chance it is the larger set's share."""
    smaller = torch.minimum(first.sum(-1), second.sum(-1)).clamp_min(1)
    return (first & second).sum(-1).double() / smaller


def rank_correlation(
    first: Float[Tensor, "*more patches"], second: Float[Tensor, "*more patches"]
) -> Float[Tensor, "*more"]:
    """Returns Spearman's correlation over the patches, in [-1, 1]; 0 where all patches are equal."""
    ranks = (_ranks(first), _ranks(second))
    one, other = (each - each.mean(-1, keepdim=True) for each in ranks)
    size = one.norm(dim=-1) * other.norm(dim=-1)
    # Zero where one side is constant: it orders no patch before another.
    return torch.where(size > 0, (one * other).sum(-1) / size.clamp_min(torch.finfo(size.dtype).tiny), 0.0)


def noise_to_spread(draws: Float[Tensor, "draws *more patches"]) -> Float[Tensor, "*more"]:
    """Returns the variance of relevance over draws of noise, relative to its variance over the patches.

    Both are unbiased: the contribution of the noise to the variance of the mean over the draws is subtracted. Infinite
    if no difference between patches remains.
    """
    noise = noise_variance(draws)
    spread = draws.mean(0).var(-1) - noise / len(draws)
    return torch.where(spread > 0, noise / spread, torch.inf)


def noise_variance(draws: Float[Tensor, "draws *more patches"]) -> Float[Tensor, "*more"]:
    """Returns the variance of relevance over draws of noise, in the mean over the patches."""
    if len(draws) < 2:
        raise InvalidInput(f"{len(draws)} draw of noise: a variance over draws needs two at least.")
    return draws.var(0).mean(-1)


def noise_correlation(draws: Float[Tensor, "draws images layers patches"]) -> Float[Tensor, "images layers layers"]:
    """Returns the correlation of the noise of every two layers, over draws and patches, about the mean of the draws.

    Section 8 assumes that it is near zero off the diagonal.
    """
    deviations = (draws - draws.mean(0)).permute(1, 2, 0, 3).flatten(2)
    products = deviations @ deviations.mT
    own = products.diagonal(dim1=-2, dim2=-1).sqrt()
    return products / (own[:, :, None] * own[:, None, :]).clamp_min(torch.finfo(draws.dtype).tiny)


def averaging_shares(draws: Float[Tensor, "draws images layers patches"]) -> dict[str, Tensor]:
    """Returns the share of layer l's noise variance that remains in the mean over layers 1..l, [images, layers].

    Computed three ways: "measured"; "independent", if the noise of the layers had their own variances and no
    correlation; and "claimed", 1 / l, which Section 8 derives from equal variances.
    """
    each = noise_variance(draws)
    counts = torch.arange(1, each.shape[-1] + 1, dtype=each.dtype)
    return {
        "measured": noise_variance(running_mean(draws)) / each,
        "independent": each.cumsum(-1) / counts.square() / each,
        "claimed": (1 / counts).expand_as(each),
    }


def _ranks(values: Float[Tensor, "*more patches"]) -> Float[Tensor, "*more patches"]:
    """Returns the ranks in ascending order; equal values share the mean of theirs."""
    ordered = values.contiguous().sort(-1).values
    low = torch.searchsorted(ordered, values.contiguous(), right=False)
    high = torch.searchsorted(ordered, values.contiguous(), right=True)
    return (low + high - 1).double() / 2
