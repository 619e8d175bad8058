"""The tokens, sizes, indices and statistics after a stage: pruned tokens removed, or masked in place."""

import torch
from torch import nn

from attnrx.shapes import Tensor
from attnrx.tokens import (
    MapMoments,
    Reduction,
    TokenState,
)

# tokens, sizes, patch indices, moments, accumulated scores
Reduced = tuple[Tensor, Tensor, Tensor, MapMoments | None, Tensor | None]


def compressed_state(state: TokenState, reduction: Reduction) -> Reduced:
    """Returns the remaining tokens, their sizes, their patch indices, and the statistics gathered for them."""
    kept, extra, prefix = reduction.kept, reduction.extra, state.prefix
    tokens = [state.tokens[:, :prefix], reduction.tokens, *([] if extra is None else [extra])]
    sizes, indices = remaining_sizes(state, reduction), state.patch_indices.gather(1, kept)
    if extra is not None:
        indices = torch.cat([indices, indices.new_full((indices.shape[0], extra.shape[1]), -1)], dim=1)
    moments = state.moments
    if moments is not None:
        first = torch.arange(prefix, device=kept.device).expand(kept.shape[0], -1)
        moments = moments.at(torch.cat([first, prefix + kept], dim=1))
        moments = moments if extra is None else moments.with_new(extra.shape[1])
    gathered = state.accumulated
    if gathered is not None:
        gathered = nn.functional.pad(gathered.gather(1, kept), (0, 0 if extra is None else extra.shape[1]))
    return torch.cat(tokens, dim=1), torch.cat([state.sizes[:, :prefix], sizes], dim=1), indices, moments, gathered


def masked_state(state: TokenState, reduction: Reduction) -> Reduced:
    """Writes kept tokens at their indices and extra tokens at pruned indices; all other patches get size 0."""
    kept, extra, indices = reduction.kept, reduction.extra, state.patch_indices
    moments, gathered = state.moments, state.accumulated
    targets, values = kept, reduction.tokens
    if extra is not None:
        pruned_mask = state.there.scatter(1, kept, 0.0)
        free = pruned_mask.argsort(dim=1, descending=True, stable=True)[:, : extra.shape[1]]
        targets, values = torch.cat([kept, free], dim=1), torch.cat([values, extra], dim=1)
        indices, moments, gathered = replaced_state(state, free)
    patches = state.patches.scatter(1, targets[..., None].expand_as(values), values)
    sizes = torch.zeros_like(state.sizes[:, state.prefix :]).scatter(1, targets, remaining_sizes(state, reduction))
    tokens = torch.cat([state.tokens[:, : state.prefix], patches], dim=1)
    return tokens, torch.cat([state.sizes[:, : state.prefix], sizes], dim=1), indices, moments, gathered


def replaced_state(state: TokenState, added: Tensor) -> tuple[Tensor, MapMoments | None, Tensor | None]:
    """Returns patch indices and statistics after new tokens were written at the patches `added`."""
    moments, gathered = state.moments, state.accumulated
    return (
        state.patch_indices.scatter(1, added, -1),
        None if moments is None else moments.without(state.prefix + added),
        None if gathered is None else gathered.scatter(1, added, 0.0),
    )


def remaining_sizes(state: TokenState, reduction: Reduction) -> Tensor:
    if reduction.sizes is not None:
        return reduction.sizes
    sizes = state.sizes[:, state.prefix :].gather(1, reduction.kept)
    return sizes if reduction.extra is None else torch.cat([sizes, torch.ones_like(reduction.extra[..., 0])], dim=1)


def remaining_indices(indices: Tensor, sizes: Tensor, reduction: Reduction) -> Tensor:
    count = reduction.kept.shape[1] + (0 if reduction.extra is None else reduction.extra.shape[1])
    first = (sizes > 0).to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :count]
    return indices.gather(1, first)
