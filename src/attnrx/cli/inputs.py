"""From the words of a command to models and images."""

from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import attnrx as rx
from attnrx.errors import InvalidInput

if TYPE_CHECKING:
    from torch import nn


def load_splits(arguments: Namespace, image_size: int | None = None) -> "rx.data.Splits":
    """Loads the requested dataset, at the size that a model reads."""
    given = {name: getattr(arguments, name) for name in ("image_column", "label_column", "test_column")}
    named = {name: column for name, column in given.items() if column is not None}
    columns = rx.data.Columns(**named) if named else None
    return rx.load_data(arguments.data, image_size=image_size, on_corrupt=arguments.on_corrupt, columns=columns)


def splits_for(model: "nn.Module", arguments: Namespace) -> "rx.data.Splits":
    """Loads the dataset at the size and on the scale that the model was trained with."""
    _, size, _ = rx.models.family_of(model).input_shape(model)
    return rx.adapt_preprocessing(load_splits(arguments, size), model, _label_map(arguments.label_map))


def _label_map(path: str | None) -> dict[str, int] | None:
    if path is None:
        return None
    read = rx.storage.read_json(path)
    if not isinstance(read, dict):
        raise InvalidInput(f'--label-map {path}: give a JSON object, e.g. {{"tench": 0, "church": 497}}.')
    return read


def chosen_images(splits: "rx.data.Splits", arguments: Namespace) -> "rx.data.ImageSet":
    """Returns the requested split, or its first images."""
    images: rx.data.ImageSet = getattr(splits, arguments.split)
    return images if arguments.images is None else images.take(arguments.images)


def outline(source: str, trust: bool = False) -> "nn.Module":
    """Returns a model to be priced: one that is named has no weights, so nothing is allocated, drawn or downloaded."""
    import torch

    if not _is_fresh(source):
        return rx.load(source, trust=trust)
    with torch.device("meta"):
        return rx.models.build_model(source)


def _is_fresh(source: str) -> bool:
    """Whether a name says how a model is made, and not where its weights are."""
    return ":" in source and not source.startswith("hub:") and not Path(source).exists()


def load_model(source: str, device: str | None, weights: str | None = None, trust: bool = False) -> "nn.Module":
    """Loads a model onto the requested device, or where it runs fastest."""
    return placed(rx.load(source, weights=weights, trust=trust), device)


def timed_model(source: str, device: str | None, weights: str | None = None, trust: bool = False) -> "nn.Module":
    """Returns a model to be timed: one that is named gets fresh weights, so nothing is downloaded."""
    named = _is_fresh(source) and weights is None
    if named:
        return placed(rx.models.build_model(source, seed=0), device)
    return load_model(source, device, weights, trust)


def placed(model: "nn.Module", device: str | None) -> "nn.Module":
    """Puts a model onto the requested device, or where it runs fastest."""
    import torch

    wanted = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return model.to(wanted)
    except (RuntimeError, AssertionError) as error:  # an unknown device is the former, torch without CUDA the latter
        reason = str(error).partition("\n")[0]
        raise InvalidInput(f"--device {wanted}: torch cannot use it here ({reason}). Take cpu.") from error


Number = TypeVar("Number", int, float)


def numbers(option: str, text: str, kind: Callable[[str], Number]) -> tuple[Number, ...]:
    """Reads numbers with commas between them, each of one of the types of `options`."""
    try:
        return tuple(kind(part) for part in text.split(","))
    except ArgumentTypeError as error:
        raise InvalidInput(f"{option} {text!r}: {error}; give numbers with commas between them.") from error
