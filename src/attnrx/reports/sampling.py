"""Attention samples: the attention received by every patch of a few images, per layer and head."""

from collections.abc import Mapping

import torch
from torch import nn

from attnrx.errors import InvalidInput
from attnrx.models import Family, evaluating, family_of, observing, reduction_of
from attnrx.observation import Observation
from attnrx.reports.content import AttentionSamples
from attnrx.shapes import Float, Tensor


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
    return AttentionSamples(in_unit_range(images, family, original), maps, labels)


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


def in_unit_range(images: Tensor, family: Family, model: nn.Module) -> Float[Tensor, "images channels height width"]:
    """Undoes the normalization of images and clips to [0, 1]."""
    mean, std = (torch.tensor(values)[:, None, None] for values in family.normalization(model))
    return (images.cpu().float() * std + mean).clamp(0, 1)
