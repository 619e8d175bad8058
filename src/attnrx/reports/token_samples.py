"""Token samples taken from a model whose tokens leave: which patches of a few images are left after each stage."""

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

AVERAGE = "class_attention, mean over the layers so far"  # what AttentionAverage goes by


def sample_tokens(
    model: nn.Module,
    images: Float[Tensor, "images channels height width"],
    labels: tuple[str, ...] = (),
    reference: nn.Module | None = None,
) -> TokenSamples:
    """Runs a model whose tokens leave on normalized images, and the one from which none leaves where it is given."""
    reduction = reduction_of(model)
    if reduction is None:
        raise InvalidInput("no token ever leaves this model, so there is nothing to show of them.")
    if not len(images):
        raise InvalidInput("no image to show tokens on: give at least one.")
    family, layout = family_of(model), reduction.shape.layout
    given: list[Tensor] = []
    with _watching(reduction, given):
        left = patches_left(model, images)
    counts = [places.shape[1] for places in reduction.run.trail] or [layout.patches] * len(reduction.policy.layers)
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
    there, found = patches, []
    for layer in range(1, len(family_of(model).attention(model)) + 1):
        there = after.get(layer, there)
        found.append(prefix + there)
    return tuple(found)


def _grid(patches: int, height: int, width: int) -> tuple[int, int]:
    """Returns the rows and columns of patches that are square on an image of this size."""
    rows = round((patches * height / width) ** 0.5)
    if rows < 1 or patches % rows:
        raise InvalidInput(
            f"{patches} patches of images of {height} x {width} are no grid of squares; they cannot be drawn."
        )
    return rows, patches // rows


def _joined(given: list[Tensor], left: Tensor) -> Tensor | None:
    """Stacks what the stages gave; the stages at which nothing leaves ask no reducer, and come first."""
    if not given:
        return None
    silent = [torch.full_like(given[0], torch.nan)] * (left.shape[1] - len(given))
    return torch.stack([*silent, *given], dim=1)


@contextmanager
def _watching(reduction: TokenReduction, given: list[Tensor]) -> Iterator[None]:
    """Appends the relevance of the patches at every stage where the reducer decides, if it uses one."""
    policy, patches = reduction.policy, reduction.shape.layout.patches
    if not isinstance(policy.reducer, Selecting):
        yield
        return
    own, watched = policy.reducer, copy.copy(policy.reducer)

    def shown(state: TokenState, predictor: nn.Module) -> Tensor:
        relevance = own.relevance(state, predictor)
        given.append(_placed(state, relevance, patches))
        return relevance

    object.__setattr__(watched, "relevance", shown)  # in this copy only, for as long as the samples are taken
    reduction.policy = replace(policy, reducer=watched)
    try:
        yield
    finally:
        reduction.policy = policy


def _placed(state: TokenState, relevance: Tensor, patches: int) -> Tensor:
    there = (state.sizes[:, state.prefix :] > 0) & (state.places >= 0)
    places = state.places.where(there, patches)
    found = torch.full((len(places), patches + 1), torch.nan, dtype=torch.float64, device=places.device)
    return found.scatter(1, places, relevance.detach().double())[:, :patches].cpu()
