"""Prepares a run: signals, determinism, and checks of the data and of the processes."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from attnrx.data import FixedImages, ImageSet, Splits, require_labels
from attnrx.data.model_data import normalization_of, num_classes
from attnrx.data.user_data import IndexedImages
from attnrx.support.errors import InvalidInput, NotSupported
from attnrx.support.optional import required_module
from attnrx.training.config import TrainingConfig
from attnrx.vit.models import family_of, num_outputs, require_ordinary_weights

if TYPE_CHECKING:
    from accelerate import Accelerator

ONE_COPY = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU")  # distributed types of Accelerate that do not shard the model


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Handles Ctrl-C and termination at the end of a step instead of within one: the first SIGINT or SIGTERM sets the
    event, and raises KeyboardInterrupt at the end of the context if it is still pending.

    A second one raises it immediately, without a new checkpoint. Has no effect outside the main thread, where signals
    cannot be handled.
    """
    interruption = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if interruption.is_set():
            raise KeyboardInterrupt
        interruption.set()

    # Python runs handlers in the main thread, and refuses to install them in another one.
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if interruption.is_set():
        raise KeyboardInterrupt


@contextmanager
def deterministic() -> Iterator[None]:
    """Enables deterministic algorithms where they exist; restores the caller's settings and generators at the end.

    The backward pass of fused attention on CUDA is deterministic only where nothing else is allowed, which fails for
    operations that have no deterministic algorithm. So that is left to the caller, who requires it by
    `torch.use_deterministic_algorithms(True)`; without it, PyTorch warns once of that pass.
    """
    debugging: Any = torch.utils.deterministic  # its attribute is set at run time, unknown to type checkers
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = debugging.fill_uninitialized_memory
    # Only the device of this process: forking the generators of all devices would initialize them.
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        try:
            torch.use_deterministic_algorithms(True, warn_only=warn_only or not was_deterministic)
            debugging.fill_uninitialized_memory = False  # a debugging aid that costs a pass over memory
            yield
        finally:
            torch.use_deterministic_algorithms(was_deterministic, warn_only=warn_only)
            debugging.fill_uninitialized_memory = fill


def adapt_data(model: nn.Module, splits: Splits, config: TrainingConfig) -> Splits:
    """Returns the data on the model's input scale; raises an error if the model or the batch size does not fit it.

    Where a loss reads labels, every training image must have one of a class of the model; else none needs a label, and
    the data may have fewer classes than the model.

    Raises:
        InvalidInput: The batch size, the size of the images or the number of classes does not fit.
        DataError: A loss reads labels, and there are none, or not those of the model.
    """
    if config.batch_size > len(splits.train):
        raise InvalidInput(
            f"batch_size={config.batch_size} is more than the {len(splits.train)} training images of {splits.name}; "
            "give a smaller one."
        )
    require_ordinary_weights(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InvalidInput("no parameter of the model requires a gradient: set requires_grad_(True) for some.")
    # Of the first image, because a user's data have no declared size.
    shape, actual = family_of(model).input_shape(model), next(splits.train.take(1).batches(1)).images.shape[1:]
    if shape != tuple(actual):
        raise InvalidInput(
            f"the model takes images of {shape} (channels, height, width) and {splits.name} has {tuple(actual)}; "
            "load the data with the model's image_size, or build the model for this data."
        )
    classes, num_named = num_logits(model), len(splits.class_names)
    if not classes and config.reads_labels:
        raise InvalidInput(
            f"the losses {', '.join(loss.name for loss in config.losses if loss.reads_labels)} read labels, and the "
            "model has no classifier; train it with a teacher only, e.g. FeatureDistillation, or give it a classifier."
        )
    # One logit distinguishes two classes, but the losses take one logit per class.
    if classes and (num_classes(model) < num_named or (config.reads_labels and classes != num_named)):
        raise InvalidInput(
            f"the model has {classes} classes and {splits.name} has {num_named}; build the model for this data, or "
            "train with a teacher only, without the task loss."
        )
    if config.reads_labels:
        require_labels(splits.train)
        splits = replace(splits, train=_limited(splits.train, classes))
    normalization = normalization_of(model)
    return splits if normalization == splits.normalization else splits.renormalized(normalization)


def num_logits(model: nn.Module) -> int:
    """Returns the number of logits of an image; 0 for a model of embeddings."""
    heads = family_of(model).heads(model)
    return num_outputs(heads[0]) if heads else 0


def _limited(images: ImageSet, classes: int) -> ImageSet:
    """Returns the images with a check of their labels, where these are a user's; named datasets are checked on loading.

    The labels are checked on the CPU, because on a GPU a label out of range ends the process.
    """
    return images.limited_to(classes) if isinstance(images, IndexedImages | FixedImages) else images


def with_labels(images: ImageSet, classes: int) -> ImageSet | None:
    """Returns the images for a measurement of accuracy; None without labels, or if the model has no logit per class."""
    return _limited(images, classes) if classes > 1 and images.label_problem is None else None


def make_accelerator(model: nn.Module, config: TrainingConfig) -> "Accelerator":
    """Returns the Accelerate object of the launched processes, after checking their parallel mode and number.

    Raises:
        NotSupported: The processes were launched for another parallel mode.
        InvalidInput: The batch size is no multiple of the number of processes.
    """
    # A layer whose heads have no directions has unused empty parameters; DDP requires a flag for unused parameters.
    unused = any(not parameter.numel() for parameter in model.parameters())
    # The config sets the precision, not Accelerate, so that a run does not depend on how it was launched.
    accelerate = required_module("accelerate", "train", "training")
    parallel = accelerate.DistributedDataParallelKwargs(find_unused_parameters=unused)
    accelerator = accelerate.Accelerator(mixed_precision="no", kwargs_handlers=[parallel])
    if accelerator.distributed_type.value not in ONE_COPY:
        raise NotSupported(
            f"the processes were launched for {accelerator.distributed_type.value}; launch plain data parallel "
            'processes, and set parallel="fsdp" (--parallel fsdp) for sharded weights.'
        )
    if config.batch_size % accelerator.num_processes:
        raise InvalidInput(
            f"batch_size={config.batch_size} cannot be divided between {accelerator.num_processes} processes; give a "
            "multiple of their number."
        )
    return accelerator
