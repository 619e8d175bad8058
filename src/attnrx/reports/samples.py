"""Samples for reports: the attention that the patches of a few images receive, and the patches that are kept."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from attnrx.diagnostics.watches import CLASS_ATTENTION, running_mean
from attnrx.errors import InvalidInput
from attnrx.model_diagnosis import patches_left, token_relevance
from attnrx.models import Family, TokenReduction, evaluating, family_of, observing, reduction_of
from attnrx.observation import Observation
from attnrx.reports.content import AttentionSamples, TokenSamples
from attnrx.shapes import Float, Tensor
from attnrx.tokens import Selecting, TokenState

AVERAGE = "class_attention, mean over the layers so far"  # the criterion of AttentionAverage


def sample_attention(
    models: Mapping[str, nn.Module],
    images: Float[Tensor, "images channels height width"],
    labels: tuple[str, ...] = (),
) -> AttentionSamples:
    """Runs the models, the original first, on normalized images and returns their received attention for a report.

    Heads are at their index in the original model, independent of the storage order of a compressed one.
    """
    if not models or not len(images):
        raise InvalidInput(f"{len(models)} models and {len(images)} images: give at least one of each.")
    reduced = [name for name, model in models.items() if reduction_of(model) is not None]
    if reduced:
        raise InvalidInput(
            f"{', '.join(reduced)} has token reduction, so its layers have maps of different sizes; see "
            "`sample_tokens`."
        )
    original = next(iter(models.values()))
    family = family_of(original)
    heads = max(max(layer.spec.heads, default=0) for layer in family.attention(original)) + 1
    maps = {name: _received(model, images, heads) for name, model in models.items()}
    return AttentionSamples(_in_unit_range(images, family, original), maps, labels)


def _received(model: nn.Module, images: Tensor, heads: int) -> Float[Tensor, "images layers heads tokens"]:
    family = family_of(model)
    layers = family.attention(model)
    maps: dict[int, Tensor] = {}
    prefix = family.token_layout(model).prefix

    def observe(layer: int, observation: Observation) -> None:
        received = observation.attention[..., prefix:, prefix:].sum(-2).double().cpu()
        received = received / received.sum(-1, keepdim=True)
        by_head = received.new_full((received.shape[0], heads, received.shape[-1]), torch.nan)
        by_head[:, list(layers[layer].spec.heads)] = received
        maps[layer] = by_head

    weight = next(model.parameters())
    with evaluating([model]), observing(model, family, observe):
        model(images.to(weight.device, weight.dtype))
    tokens = max(by_head.shape[-1] for by_head in maps.values())
    empty = torch.full((len(images), heads, tokens), torch.nan, dtype=torch.float64)  # for a layer without heads
    return torch.stack([maps.get(layer, empty) for layer in range(len(layers))], dim=1)


def _in_unit_range(images: Tensor, family: Family, model: nn.Module) -> Float[Tensor, "images channels height width"]:
    """Undoes the normalization of images and clips to [0, 1]."""
    mean, std = (torch.tensor(values)[:, None, None] for values in family.normalization(model))
    return (images.cpu().float() * std + mean).clamp(0, 1)


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
    family, layout, policy = family_of(model), reduction.shape.layout, reduction.policy
    given: list[Tensor] = []
    with _recording_relevance(reduction, given):
        left = patches_left(model, images)
    # The reducer has no relevance at the first stages if they keep all tokens.
    unknown = [torch.full_like(given[0], torch.nan)] * (left.shape[1] - len(given)) if given else []
    # Without a trail no stage pruned a token.
    counts = [indices.shape[1] for indices in reduction.run.trail] or [layout.patches] * len(policy.layers)
    after = dict(zip(policy.layers, counts, strict=True))
    remaining, tokens = layout.patches, []
    for layer in range(1, len(family.attention(model)) + 1):
        remaining = after.get(layer, remaining)
        tokens.append(layout.prefix + remaining)
    return TokenSamples(
        images=_in_unit_range(images, family, model),
        left=left,
        policy=policy,
        tokens=tuple(tokens),
        grid=_grid(layout.patches, *family.input_shape(model)[1:]),
        given=torch.stack([*unknown, *given], dim=1) if given else None,
        by_layer=None if reference is None else _by_source(token_relevance(reference, images)),
        labels=labels,
    )


def _by_source(found: dict[str, Tensor]) -> dict[str, Tensor]:
    if CLASS_ATTENTION not in found:
        return found
    average = running_mean(found[CLASS_ATTENTION])
    return {CLASS_ATTENTION: found.pop(CLASS_ATTENTION), AVERAGE: average, **found}


def _grid(patches: int, height: int, width: int) -> tuple[int, int]:
    """Returns the rows and columns of the grid of square patches of an image of this size."""
    rows = round((patches * height / width) ** 0.5)
    if rows < 1 or patches % rows:
        raise InvalidInput(
            f"{patches} patches of images of {height} x {width} are not a grid of squares; they cannot be drawn."
        )
    return rows, patches // rows


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
