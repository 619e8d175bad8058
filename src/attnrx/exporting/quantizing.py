"""Quantization of an OpenVINO or ONNX graph to 8 bits, by NNCF."""

import io
import logging
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from itertools import islice
from typing import Any

import torch

from attnrx.support.optional import required_module
from attnrx.support.rounding import ChannelRanges, is_inexact, rounded_linear
from attnrx.support.shapes import Tensor

# attnrx's own files have corrected biases only with at least CORRECTED images. A file with fewer images is usually only
# timed, and the correction takes NNCF as long as everything else.
CORRECTED = 32
# About how many images show which maps cannot be rounded to 8 bits.
SHOWN = 32


def quantized(model: Any, inputs: Iterable[Any], floats: Sequence[str] = (), *, by_defaults: bool = False) -> Any:
    """Returns a graph with 8-bit matrix products, quantized by NNCF's scheme for transformers.

    NNCF applies SmoothQuant and, with at least CORRECTED images, corrects biases. To measure the ranges of activations,
    it calls the graph once with every item of `inputs`. By default, an activation's range covers all inputs. With
    `by_defaults`, all settings are NNCF's own. The range is then the mean over the ranges of single inputs, which clips
    outliers in the activations of pre-trained models. Operations whose names are in `floats` are not quantized.

    Raises:
        NotSupported: NNCF is not installed.
    """
    samples = list(inputs)
    count = sum(len(next(iter(each.values())) if isinstance(each, dict) else each) for each in samples)
    with silent():
        nncf = required_module("nncf", "int8", "a file of 8 bits")
        ranges = required_module("nncf.quantization.range_estimator", "int8", "a file of 8 bits")
        parameters = nncf.AdvancedQuantizationParameters(
            activations_range_estimator_params=ranges.RangeEstimatorParametersSet.MINMAX,
            disable_bias_correction=count < CORRECTED,
        )
        return nncf.quantize(
            model,
            nncf.Dataset(samples),
            model_type=nncf.ModelType.TRANSFORMER,
            subset_size=len(samples),
            ignored_scope=nncf.IgnoredScope(names=list(floats)) if floats else None,
            advanced_parameters=None if by_defaults else parameters,
        )


def inexact_maps(program: torch.export.ExportedProgram, images: Sequence[Tensor]) -> set[str]:
    """Returns the names of the linear maps in a program that cannot be rounded to 8 bits (`is_inexact`).

    `images` are batches [batch, ...] of inputs. The first SHOWN images are used.
    """
    maps = _Rounding(program.module(check_guards=False))
    with torch.no_grad():
        for batch in islice(images, -(-SHOWN // max(len(images[0]), 1)) if images else 0):
            maps.run(batch)
    return maps.inexact


class _Rounding(torch.fx.Interpreter):
    """Runs a program, and collects the names of linear maps that would be inexact in 8 bits."""

    def __init__(self, module: torch.fx.GraphModule):
        super().__init__(module)
        self.inexact = set[str]()

    def run_node(self, n: torch.fx.Node) -> Any:
        exact = super().run_node(n)
        if n.target is torch.ops.aten.linear.default:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            operands: Any = (*args, *kwargs.values(), None)
            input, weight, bias = operands[:3]
            if exact.numel() and exact.ndim > 1:
                rounded = rounded_linear(input, weight, bias, ChannelRanges.of(input))
                self.inexact |= {n.name} if is_inexact(rounded, exact) else set()
        return exact


@contextmanager
def silent() -> Iterator[None]:
    """Suppresses what other libraries print, their warnings, and their log messages up to the level of warnings."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
