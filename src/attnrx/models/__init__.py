"""Model families: where attention lives in each kind of model, and how a model is named, built, saved and loaded."""

from pathlib import Path
from typing import Any

from torch import nn

from attnrx.errors import NotSupported, UnknownName
from attnrx.models.checkpoint import load_weights, save_weights
from attnrx.models.family import Family, model_fingerprint
from attnrx.models.low_rank_linear import LowRankLinear, rank_of
from attnrx.models.observing import evaluating, observing, observing_mlp
from attnrx.models.vit import VisionTransformer, ViTConfig, initialize_
from attnrx.models.vit_family import SCENARIOS, ViTFamily, config_costs, named_config

FAMILIES: tuple[Family, ...] = (ViTFamily(),)

__all__ = [
    "FAMILIES",
    "SCENARIOS",
    "Family",
    "LowRankLinear",
    "ViTConfig",
    "VisionTransformer",
    "build_model",
    "config_costs",
    "evaluating",
    "family_of",
    "initialize_",
    "load_model",
    "model_fingerprint",
    "model_names",
    "named_config",
    "observing",
    "observing_mlp",
    "rank_of",
    "save_model",
]


def family_of(model: nn.Module) -> Family:
    """Finds the family of a model, or refuses the model by name."""
    for family in FAMILIES:
        if family.matches(model):
            return family
    raise NotSupported(
        f"{type(model).__module__}.{type(model).__name__} is not a model that attnrx knows; "
        f"supported are {', '.join(model_names())} and folders saved by attnrx."
    )


def model_names() -> tuple[str, ...]:
    """Every name that `build_model` accepts."""
    return tuple(f"{form}:{scenario}" for form in ("svda", "dense") for scenario in SCENARIOS)


def build_model(name: str, seed: int = 0, strength: float = 1.0, **changes: Any) -> nn.Module:
    """Builds a freshly initialized model from its name, e.g. `svda:cifar10`; `changes` override fields of its
    configuration.
    """
    form, _, scenario = name.partition(":")
    if form not in ("svda", "dense") or scenario not in SCENARIOS:
        raise UnknownName("model", name, model_names())
    return initialize_(VisionTransformer(named_config(form, scenario, **changes)), seed, strength)


def load_model(source: str | Path | nn.Module, seed: int = 0) -> nn.Module:
    """Gives a model from a saved folder, from a name (fresh weights), or the instance itself if its family is known."""
    if isinstance(source, nn.Module):
        family_of(source)
        return source
    if isinstance(source, str) and ":" in source and not Path(source).exists():
        return build_model(source, seed).eval()
    return load_weights(source, FAMILIES)


def save_model(folder: Path | str, model: nn.Module, notes: dict[str, Any] | None = None) -> Path:
    """Saves a model of a known family as a folder that `load_model` reads."""
    return save_weights(folder, model, family_of(model), notes)
