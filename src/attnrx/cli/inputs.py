"""Loading of models and images from the arguments of a command."""

from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import attnrx as rx
from attnrx.errors import InvalidInput

if TYPE_CHECKING:
    from torch import nn


def load_splits(arguments: Namespace, image_size: int | None = None) -> "rx.data.Splits":
    """Loads the dataset at the image size of a model."""
    given = {name: getattr(arguments, name) for name in ("image_column", "label_column", "test_column")}
    named = {name: column for name, column in given.items() if column is not None}
    columns = rx.data.Columns(**named) if named else None
    return rx.load_data(arguments.data, image_size=image_size, on_corrupt=arguments.on_corrupt, columns=columns)


def splits_argument(model: "nn.Module", arguments: Namespace) -> "rx.data.Splits":
    """Loads the dataset with the image size and normalization of the model."""
    _, size, _ = rx.models.family_of(model).input_shape(model)
    return rx.adapt_preprocessing(load_splits(arguments, size), model, _label_map(arguments.label_map))


def _label_map(path: str | None) -> dict[str, int] | None:
    if path is None:
        return None
    read = rx.serialization.read_json(path)
    if not isinstance(read, dict):
        raise InvalidInput(f'--label-map {path}: give a JSON object, e.g. {{"tench": 0, "church": 497}}.')
    return read


def chosen_images(splits: "rx.data.Splits", arguments: Namespace) -> "rx.data.ImageSet":
    """Returns the requested split, or its first images."""
    images: rx.data.ImageSet = getattr(splits, arguments.split)
    return images if arguments.images is None else images.take(arguments.images)


def outline(source: str, trust: bool = False) -> "nn.Module":
    """Returns a model for cost computations; a name is built on the meta device, without weights or downloads."""
    import torch

    if not _is_fresh(source):
        return rx.load(source, trust=trust)
    with torch.device("meta"):
        return rx.models.build_model(source)


def _is_fresh(source: str) -> bool:
    """Whether a source is the name of an architecture, and not a location of weights."""
    return ":" in source and not source.startswith("hub:") and not Path(source).exists()


def model_argument(source: str, device: str | None, weights: str | None = None, trust: bool = False) -> "nn.Module":
    """Loads a model to the requested device, by default CUDA if available."""
    return placed(rx.load(source, weights=weights, trust=trust), device)


def timed_model(source: str, device: str | None, weights: str | None = None, trust: bool = False) -> "nn.Module":
    """Returns a model for latency measurements; a name gets random weights, so that nothing is downloaded."""
    if _is_fresh(source) and weights is None:
        return placed(rx.models.build_model(source, seed=0), device)
    return model_argument(source, device, weights, trust)


def placed(model: "nn.Module", device: str | None) -> "nn.Module":
    """Moves a model to the requested device, by default CUDA if available."""
    import torch

    wanted = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return model.to(wanted)
    except (RuntimeError, AssertionError) as error:  # RuntimeError: unknown device; AssertionError: torch without CUDA
        reason = str(error).partition("\n")[0]
        raise InvalidInput(f"--device {wanted}: torch cannot use it here ({reason}). Take cpu.") from error


Number = TypeVar("Number", int, float)


def numbers(option: str, text: str, kind: Callable[[str], Number]) -> tuple[Number, ...]:
    """Parses comma-separated numbers of one of the types of `options`."""
    try:
        return tuple(kind(part) for part in text.split(","))
    except ArgumentTypeError as error:
        raise InvalidInput(f"{option} {text!r}: {error}; give numbers with commas between them.") from error
