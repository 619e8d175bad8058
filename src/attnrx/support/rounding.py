"""Simulates the linear maps of an 8-bit file, with gradients, so that models can be fitted before quantization.

Some maps cannot be rounded to 8 bits. For example, one hidden unit of a ViT-Tiny has the value 214 in some tokens, and
all others are below 15. SmoothQuant then moves this range into the weights, and the other weights of every row lose
their precision. Such maps stay in float (`is_inexact`), here and in the file.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from attnrx.support.errors import NotSupported
from attnrx.support.shapes import Float, Tensor

# The share of an input channel's range that SmoothQuant (Xiao et al., 2023, Eq. 4) moves into the weights, as in NNCF.
SMOOTHED = 0.95
INPUT_STEPS, WEIGHT_STEPS = 255, 127
# A map stays in float if its mean relative squared error is above INEXACT. In a ViT-Tiny, one map has an error of 0.01,
# and the others have at most 0.002. With this one map in float, the KL of the 8-bit file falls from 0.0126 to 0.0059
# (256 images for calibration, 500 others).
INEXACT = 5e-3


@dataclass(frozen=True)
class ChannelRanges:
    """The smallest and the largest input of every channel of one linear map."""

    low: Float[Tensor, "inputs"]
    high: Float[Tensor, "inputs"]

    @classmethod
    def of(cls, inputs: Float[Tensor, "*batch inputs"]) -> "ChannelRanges":
        rows = inputs.detach().reshape(-1, inputs.shape[-1])
        return cls(rows.amin(0), rows.amax(0))

    def joined(self, other: "ChannelRanges") -> "ChannelRanges":
        return ChannelRanges(torch.minimum(self.low, other.low), torch.maximum(self.high, other.high))


class EightBits(TorchFunctionMode):
    """Computes every linear map with inputs and weights rounded to 8 bits, as in NNCF's scheme for transformers.

    Every input channel is divided by a factor (SmoothQuant). Then all channels are rounded within one range, which
    covers the inputs of all passes under `calibrating`. Every row of the weights has its own range. The mean error of
    every output is subtracted, as in bias correction after quantization. Gradients pass through the rounding unchanged
    (Bengio et al., 2013). If a map cannot be rounded to 8 bits (`is_inexact`), it is computed in float.

    Maps are identified by the order of the calls, so every `pass_` must be one pass of the same module. Gradients are
    enabled during the pass. Without gradients, a module may compute several maps in one fused kernel, which would not
    be rounded.
    """

    def __init__(self):
        super().__init__()
        self.ranges: list[ChannelRanges] = []
        self._floats: dict[int, bool] = {}  # whether a map is computed in float, decided in the first rounded pass
        self._calls, self._calibrates = 0, False

    @contextmanager
    def calibrating(self) -> Iterator[None]:
        """Widens the ranges to cover the inputs of all passes inside the context, without rounding these passes."""
        self._calibrates = True
        try:
            yield
        finally:
            self._calibrates = False

    def pass_(self, run: Callable[[], Tensor]) -> Tensor:
        """Returns the output of `run`, computed with rounded maps. `run` must be one pass of the module."""
        has_gradients = torch.is_grad_enabled()
        self._calls = 0
        with torch.enable_grad(), self:
            outputs = run()
        return outputs if has_gradients else outputs.detach()

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is not F.linear:
            return function(*args, **(kwargs or {}))
        return self._linear(*args, **(kwargs or {}))

    def _linear(
        self,
        input: Float[Tensor, "*batch inputs"],
        weight: Float[Tensor, "outputs inputs"],
        bias: Float[Tensor, "outputs"] | None = None,
    ) -> Float[Tensor, "*batch outputs"]:
        index, self._calls = self._calls, self._calls + 1
        is_empty = not (input.numel() and weight.numel())
        if self._calibrates and not is_empty:
            self._widen(index, ChannelRanges.of(input))
        if self._calibrates or is_empty:
            return F.linear(input, weight, bias)
        if index >= len(self.ranges) or len(self.ranges[index].low) != weight.shape[1]:
            raise NotSupported("bits=8: the maps that this model computes differ from one pass to the next.")
        if self._floats.get(index):
            return F.linear(input, weight, bias)
        result = rounded_linear(input, weight, bias, self.ranges[index])
        if index not in self._floats:
            exact = F.linear(input, weight, bias)
            self._floats[index] = is_inexact(result, exact)
            return exact if self._floats[index] else result
        return result

    def _widen(self, index: int, ranges: ChannelRanges) -> None:
        if index < len(self.ranges):
            self.ranges[index] = ranges.joined(self.ranges[index])
        else:
            self.ranges.append(ranges)


def rounded_linear(
    input: Float[Tensor, "*batch inputs"],
    weight: Float[Tensor, "outputs inputs"],
    bias: Float[Tensor, "outputs"] | None,
    ranges: ChannelRanges,
) -> Float[Tensor, "*batch outputs"]:
    """Computes a linear map with inputs and weights rounded to 8 bits, and without the mean error (`EightBits`)."""
    factors = smoothing_factors(ranges, weight)
    low, high = (ranges.low / factors).min(), (ranges.high / factors).max()
    inputs, rows = rounded_inputs(input / factors, low, high), rounded_rows(weight * factors)
    # A map is linear, so the mean error of its outputs follows from the mean inputs.
    first = tuple(range(input.ndim - 1))
    error = F.linear(inputs.detach().mean(first), rows.detach()) - F.linear(input.detach().mean(first), weight.detach())
    return F.linear(inputs, rows, -error if bias is None else bias - error)


def is_inexact(rounded: Float[Tensor, "*batch outputs"], exact: Float[Tensor, "*batch outputs"]) -> bool:
    """Returns whether the mean relative squared error of a rounded map's outputs is above INEXACT.

    The error of every token is relative to this token's output without its mean. A few tokens with large outputs would
    otherwise hide the errors of all others.
    """
    exact, error = exact.detach().flatten(0, -2), (rounded - exact).detach().flatten(0, -2)
    sizes = (exact - exact.mean(0)).square().sum(-1)
    used = sizes > 0
    return bool(used.any()) and float((error.square().sum(-1)[used] / sizes[used]).mean()) > INEXACT


def smoothing_factors(ranges: ChannelRanges, weight: Float[Tensor, "outputs inputs"]) -> Float[Tensor, "inputs"]:
    """Returns the factors that SmoothQuant divides input channels by (Xiao et al., 2023, Eq. 4).

    The factor is 1 for a channel whose inputs or weights are all zero.
    """
    inputs, weights = torch.maximum(-ranges.low, ranges.high), weight.detach().abs().amax(0)
    factors = inputs**SMOOTHED / weights ** (1 - SMOOTHED)
    return torch.where((inputs > 0) & (weights > 0), factors, 1.0)


def rounded_inputs(inputs: Float[Tensor, "*_"], low: Float[Tensor, ""], high: Float[Tensor, ""]) -> Float[Tensor, "*_"]:
    """Returns the inputs rounded to 256 evenly spaced numbers from `low` to `high`, which include zero."""
    step = ((high.clamp_min(0) - low.clamp_max(0)) / INPUT_STEPS).clamp_min(torch.finfo(inputs.dtype).tiny)
    zero = (-low.clamp_max(0) / step).round()
    return _Rounded.apply(inputs, step, -zero, INPUT_STEPS - zero)


def rounded_rows(weight: Float[Tensor, "outputs inputs"]) -> Float[Tensor, "outputs inputs"]:
    """Returns the weights rounded to 255 evenly spaced numbers around zero, with a separate step for every row."""
    step = (weight.detach().abs().amax(1, keepdim=True) / WEIGHT_STEPS).clamp_min(torch.finfo(weight.dtype).tiny)
    return _Rounded.apply(weight, step, step.new_tensor(-WEIGHT_STEPS), step.new_tensor(WEIGHT_STEPS))


class _Rounded(torch.autograd.Function):
    """Rounds numbers to multiples of a step, from `least` to `most` steps. Gradients pass unchanged."""

    @staticmethod
    def forward(ctx: Any, exact: Tensor, step: Tensor, least: Tensor, most: Tensor) -> Tensor:
        del ctx
        # In place, because these passes over all activations take as long as the products.
        return exact.div(step).round_().clamp_(least, most).mul_(step)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        del ctx
        return gradients[0], None, None, None


def rounded(run: Callable[[Tensor], Tensor], inputs: Iterable[Tensor], bits: int | None) -> Callable[[Tensor], Tensor]:
    """Returns `run` with its linear maps computed as in a file of `bits` bits, or unchanged if `bits` is None.

    `run` is one pass of a module. First, it is called with each of the `inputs` [any shape] to measure the ranges.
    """
    if bits is None:
        return run
    rounding = EightBits()
    with torch.no_grad(), rounding.calibrating():
        for each in inputs:
            rounding.pass_(partial(run, each))
    return lambda tokens: rounding.pass_(partial(run, tokens))
