"""Inputs of commands: models, data, files, candidates and losses from their texts."""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attnrx as rx
from attnrx.support.errors import InvalidInput

if TYPE_CHECKING:
    from torch import nn


def require_inputs(arguments: Namespace) -> None:
    """Checks the dataset, columns, the class map and the format before a model is loaded.

    Raises:
        InvalidInput: The class map is no JSON object.
    """
    data, to = (getattr(arguments, name, None) for name in ("data", "to"))
    if data is None and to is None:
        return
    from attnrx.verbs.load import preflight  # imports torch

    preflight(formats=() if to is None else (rx.exporting.parse_format(to),))
    if getattr(arguments, "label_map", None) is not None:
        _label_map(arguments.label_map)
    if data is not None:
        preflight(data=data, columns=_columns(arguments))


def _label_map(path: str) -> dict[str, int]:
    label_map = rx.serialization.read_json(path)
    # read_json accepts any JSON, a list too.
    if not isinstance(label_map, dict):
        raise InvalidInput(f'--label-map {path}: give a JSON object, e.g. {{"tench": 0, "church": 497}}.')
    return label_map


def _columns(arguments: Namespace) -> "rx.data.Columns":
    # Not every command with data has these options.
    image, label, test = (getattr(arguments, f"{name}_column", None) for name in ("image", "label", "test"))
    return rx.data.Columns(image_column=image, label_column=label, test_column=test)


def load_splits(arguments: Namespace, **shape: Any) -> "rx.data.Splits":
    return rx.load_data(arguments.data, columns=_columns(arguments), **shape)


def splits_argument(model: "nn.Module", arguments: Namespace, distinct: bool = False) -> "rx.data.Splits":
    """Loads the dataset with the preprocessing of the model; `distinct` uses an image of several splits once.

    Raises:
        InvalidInput: The class map is no JSON object.
    """
    path = arguments.label_map
    splits = rx.adapt_preprocessing(load_splits(arguments), model, None if path is None else _label_map(path))
    return rx.data.distinct_splits(splits) if distinct else splits


def chosen_images(splits: "rx.data.Splits", arguments: Namespace) -> "rx.data.ImageSet":
    images: rx.data.ImageSet = getattr(splits, arguments.split)
    return images if arguments.images is None else images.take(arguments.images)


def names_model(text: str) -> bool:
    """Whether a text names a model and not a file: a folder, a size of an elastic model, or KIND:NAME."""
    path = Path(text)
    from attnrx.nouns.elastic import is_elastic  # imports torch

    folder = text.rpartition("@")[0]  # of an elastic model, FOLDER@macs=0.6
    return path.is_dir() or bool(folder and is_elastic(folder)) or (":" in text and not path.exists())


def outline(source: str, trust: bool = False) -> "nn.Module":
    """Returns a model for cost computations; a name is built on the meta device, without weights or downloads."""
    import torch

    if not is_fresh(source):
        return rx.load(source, trust=trust)
    with torch.device("meta"):  # shapes without memory
        return rx.models.build_model(source)


def is_fresh(source: str) -> bool:
    """Whether a source is the name of an architecture, and not a location of weights."""
    # A path may contain a colon too, so an existing one is a location.
    return ":" in source and not source.startswith("hub:") and not Path(source).exists()


def model_argument(source: str, device: str | None, weights: str | None = None, trust: bool = False) -> "nn.Module":
    """Loads a model to the requested device, by default CUDA if available.

    Raises:
        InvalidInput: torch cannot use the device.
    """
    return placed(rx.load(source, weights=weights, trust=trust), device)


def placed(model: "nn.Module", device: str | None) -> "nn.Module":
    """Moves a model to the requested device, by default CUDA if available.

    Raises:
        InvalidInput: torch cannot use the device here.
    """
    wanted = device or default_device()
    try:
        return model.to(wanted)
    except (RuntimeError, AssertionError) as error:  # RuntimeError: unknown device; AssertionError: torch without CUDA
        reason = str(error).partition("\n")[0]
        raise InvalidInput(f"--device {wanted}: torch cannot use it here ({reason}). Take cpu.") from error


def default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def parse_losses(
    texts: Sequence[str], shared: Mapping[str, str] | None = None, task: bool = True
) -> "tuple[rx.losses.Loss, ...]":
    """Returns the losses, preceded by the default task loss if `task` and no text contains one.

    `shared` are default knobs for every loss that has them: the teacher and its weights.

    Raises:
        InvalidInput: The task is given and excluded, no loss uses a given knob, or there is no loss.
    """
    losses = tuple(rx.losses.parse_loss(text, shared) for text in texts)
    has_task = any(isinstance(loss, rx.losses.Task) for loss in losses)
    if has_task and not task:
        raise InvalidInput("the losses contain the task, and --no-task excludes it; give one of the two.")
    # An option without effect is an error, because the user expects one.
    unused = [knob for knob in shared or {} if not any(hasattr(loss, knob) for loss in losses)]
    if unused:
        raise InvalidInput(
            f"a {unused[0]} was given, and none of the losses uses one; add distillation or "
            "feature_distillation to the losses."
        )
    if not losses and not task:
        raise InvalidInput("without the task and without other losses there is nothing to learn; give --losses.")
    return losses if has_task or not task else (rx.losses.Task(), *losses)
