"""Token samples: the patches of a few images that are kept after each stage of a model with token reduction."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from attnrx.diagnostics.token_relevance import CLASS_ATTENTION, running_mean
from attnrx.errors import InvalidInput
from attnrx.model_diagnosis import patches_left, token_relevance
from attnrx.models import TokenReduction, family_of, reduction_of
from attnrx.reports.content import TokenSamples
from attnrx.reports.sampling import in_unit_range
from attnrx.shapes import Float, Tensor
from attnrx.tokens import Selecting, TokenState

AVERAGE = "class_attention, mean over the layers so far"  # the criterion of AttentionAverage


def sample_tokens(
    model: nn.Module,
    images: Float[Tensor, "images channels height width"],
    labels: tuple[str, ...] = (),
    reference: nn.Module | None = None,
) -> TokenSamples:
    """Runs a model with token reduction on normalized images, and the unreduced `reference` if it is given."""
    reduction = reduction_of(model)
    if reduction is None:
        raise InvalidInput("this model has no token policy, so there are no token samples.")
    if not len(images):
        raise InvalidInput("no image to show tokens on: give at least one.")
    family, layout = family_of(model), reduction.shape.layout
    given: list[Tensor] = []
    with _recording_relevance(reduction, given):
        left = patches_left(model, images)
    counts = [indices.shape[1] for indices in reduction.run.trail] or [layout.patches] * len(reduction.policy.layers)
    _, height, width = family.input_shape(model)
    return TokenSamples(
        images=in_unit_range(images, family, model),
        left=left,
        policy=reduction.policy,
        tokens=_by_layer(layout.prefix, layout.patches, dict(zip(reduction.policy.layers, counts, strict=True)), model),
        grid=_grid(layout.patches, height, width),
        given=_joined(given, left),
        by_layer=None if reference is None else _by_source(token_relevance(reference, images)),
        labels=labels,
    )


def _by_source(found: dict[str, Tensor]) -> dict[str, Tensor]:
    if CLASS_ATTENTION not in found:
        return found
    average = running_mean(found[CLASS_ATTENTION])
    return {CLASS_ATTENTION: found.pop(CLASS_ATTENTION), AVERAGE: average, **found}


def _by_layer(prefix: int, patches: int, after: dict[int, int], model: nn.Module) -> tuple[int, ...]:
    remaining, found = patches, []
    for layer in range(1, len(family_of(model).attention(model)) + 1):
        remaining = after.get(layer, remaining)
        found.append(prefix + remaining)
    return tuple(found)


def _grid(patches: int, height: int, width: int) -> tuple[int, int]:
    """Returns the rows and columns of the grid of square patches of an image of this size."""
    rows = round((patches * height / width) ** 0.5)
    if rows < 1 or patches % rows:
        raise InvalidInput(
            f"{patches} patches of images of {height} x {width} are not a grid of squares; they cannot be drawn."
        )
    return rows, patches // rows


def _joined(given: list[Tensor], left: Tensor) -> Tensor | None:
    """Stacks the relevance of the stages; the first stages have none if they keep all tokens."""
    if not given:
        return None
    missing = [torch.full_like(given[0], torch.nan)] * (left.shape[1] - len(given))
    return torch.stack([*missing, *given], dim=1)


@contextmanager
def _recording_relevance(reduction: TokenReduction, given: list[Tensor]) -> Iterator[None]:
    """Appends the relevance of the patches at every stage, if the token reducer uses relevance."""
    policy, patches = reduction.policy, reduction.shape.layout.patches
    if not isinstance(policy.reducer, Selecting):
        yield
        return
    original, recording = policy.reducer, copy.copy(policy.reducer)

    def recorded(state: TokenState, predictor: nn.Module) -> Tensor:
        relevance = original.relevance(state, predictor)
        given.append(_by_patch(state, relevance, patches))
        return relevance

    object.__setattr__(recording, "relevance", recorded)  # only in this temporary copy
    reduction.policy = replace(policy, reducer=recording)
    try:
        yield
    finally:
        reduction.policy = policy


def _by_patch(state: TokenState, relevance: Tensor, patches: int) -> Tensor:
    is_patch = (state.sizes[:, state.prefix :] > 0) & (state.patch_indices >= 0)
    indices = state.patch_indices.where(is_patch, patches)
    found = torch.full((len(indices), patches + 1), torch.nan, dtype=torch.float64, device=indices.device)
    return found.scatter(1, indices, relevance.detach().double())[:, :patches].cpu()
