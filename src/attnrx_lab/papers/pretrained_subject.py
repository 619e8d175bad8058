"""The pre-trained model of an experiment from its settings: its outline, itself, or a tiny replacement."""

from functools import lru_cache
from pathlib import Path

import torch
from torch import nn

from attnrx.api import load
from attnrx.data import Splits
from attnrx.models import build_model, family_of
from attnrx.spec import AttentionSpec
from attnrx_lab.papers.short_training import generated_splits

TINY_DIRECTIONS, TINY_SIDE, TINY_CLASSES = 8, 8, 4


def outline_of(model: str) -> nn.Module:
    """Returns the shapes of a model without its weights if its name determines them; otherwise loads it."""
    library, colon, _ = model.partition(":")
    named = colon and library != "hf" and not Path(model).exists()
    return _without_weights(model) if named else load(model)


@lru_cache(maxsize=8)  # creating one costs more than a tiny run, and many runs need the same
def _without_weights(model: str) -> nn.Module:
    with torch.device("meta"):
        return build_model(model)


def loaded(model: str, weights: str | None) -> nn.Module:
    """Loads the model with the weights of a file, or with its own."""
    return load(model, weights=weights).eval()


def tiny_twin(outline: nn.Module, seed: int, depth: int = 2) -> nn.Module:
    """Returns a small attnrx model with as many heads as the outline and random weights."""
    spec = layer_spec(outline)
    heads = len(spec.heads)
    return build_model(
        "dense:cifar10",
        seed=seed,
        image_size=TINY_SIDE,
        patch_size=TINY_SIDE // 2,
        width=TINY_DIRECTIONS * heads,
        depth=depth,
        heads=heads,
        classes=TINY_CLASSES,
    ).eval()


def tiny_splits(name: str) -> Splits:
    """Returns generated images for the tiny model."""
    return generated_splits(name, 3, TINY_CLASSES, TINY_SIDE)


def layer_spec(model: nn.Module) -> AttentionSpec:
    """Returns the shape of the first layer's attention."""
    return family_of(model).attention(model)[0].spec
