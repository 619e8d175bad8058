"""Quantization of an OpenVINO or ONNX graph to 8 bits, by NNCF."""

import io
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

import numpy as np

from attnrx.support.optional import environment, required_module

# With this environment variable NNCF reports its use to nobody; it is read at the import.
UNREPORTED = "NNCF_CI"


def quantized(model: Any, inputs: Iterable[Any], floats: Sequence[str] = (), *, by_defaults: bool = False) -> Any:
    """Returns a graph whose matrix products have 8 bits, by NNCF's scheme for transformers.

    The scheme has SmoothQuant, corrected biases, and ranges of activations from the `inputs`, each one call of the
    graph. Operations with the names `floats` stay as they are. The range of an activation covers all inputs. With
    `by_defaults` it is NNCF's own: the mean of the ranges of single inputs, which cuts off the outliers of pre-trained
    models.

    Raises:
        NotSupported: NNCF is not installed.
    """
    samples = list(inputs)
    with silent():
        nncf = imported()
        ranges = required_module("nncf.quantization.range_estimator", "int8", "a file of 8 bits")
        parameters = nncf.AdvancedQuantizationParameters(
            activations_range_estimator_params=ranges.RangeEstimatorParametersSet.MINMAX
        )
        return nncf.quantize(
            model,
            nncf.Dataset(samples),
            model_type=nncf.ModelType.TRANSFORMER,
            subset_size=len(samples),
            ignored_scope=nncf.IgnoredScope(names=list(floats)) if floats else None,
            advanced_parameters=None if by_defaults else parameters,
        )


def imported() -> Any:
    """Imports NNCF.

    Raises:
        NotSupported: NNCF is not installed.
    """
    with environment(UNREPORTED, "1"):
        return required_module("nncf", "int8", "a file of 8 bits")


def single_images(batches: Iterable[np.ndarray], is_free: bool) -> Iterator[np.ndarray]:
    """Yields the inputs of calls: single images if the graph takes any number of them, else the batches."""
    for batch in batches:
        yield from np.split(batch, len(batch)) if is_free else [batch]


@contextmanager
def silent() -> Iterator[None]:
    """Silences the logs and the progress of other libraries; not all of them have their own loggers."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(disabled)
