"""Linear maps in C++, one after the other or side by side, as one operator of PyTorch, and the layer that uses it."""

import ctypes
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from attnrx.support.modules import is_recorded
from attnrx.support.shapes import Float, Tensor
from attnrx.vit.kernels.compilation import kernel_threads, native_library, required_library
from attnrx.vit.kernels.operators import define, require_fitting, require_inference

# The smallest product that the kernel computes; for smaller ones the call itself takes longer than it saves.
LEAST_MACS = 1_000_000
# The fewest rows: they are the lanes of the kernel's vectors, of which an AVX-512 register has 16.
LEAST_ROWS = 16
# The largest weight that it multiplies by; larger ones are multiplied by PyTorch (docs/results/speed.md).
LARGEST = 1 << 20


class NativeMap(ctypes.Structure):
    """The structure `Map` of columns.hpp."""

    _fields_ = [(name, ctypes.c_int64) for name in ("weight", "bias", "inputs", "outputs", "gelu")]


def may_run_natively(features: Float[Tensor, "*batch inputs"]) -> bool:
    """Whether the kernels compute products of these features at all: for inference in float32 on a CPU."""
    # First of all comparisons: recorded sizes may be symbolic, and on other devices every comparison delays a kernel.
    return features.device.type == "cpu" and features.dtype == torch.float32 and not is_recorded()


def runs_natively(features: Float[Tensor, "*batch inputs"], *weights: Float[Tensor, "_ _"]) -> bool:
    """Whether the kernel computes the products with these weights: for inference in float32 on a CPU."""
    return (
        may_run_natively(features)
        # Subclasses (fake, distributed, quantized tensors) have products of their own.
        and type(features) is Tensor
        and features.numel() >= LEAST_ROWS * features.shape[-1]
        and features.numel() * sum([weight.shape[0] for weight in weights]) >= LEAST_MACS
        and all(map(is_native, weights))
        and not torch.is_autocast_enabled("cpu")
        and native_library() is not None
    )


def is_native(weight: Float[Tensor, "outputs inputs"]) -> bool:
    """Whether the kernel multiplies by a weight."""
    return (
        type(weight) in (nn.Parameter, Tensor)
        and weight.dtype == torch.float32
        and weight.is_cpu
        and weight.numel() <= LARGEST
    )


def linear_map(
    features: Float[Tensor, "*batch inputs"],
    weight: Float[Tensor, "outputs inputs"],
    bias: Float[Tensor, "outputs"] | None,
) -> Float[Tensor, "*batch outputs"]:
    """Returns features @ weight^T + bias, by the kernel where it `runs_natively`."""
    if not runs_natively(features, weight):
        return F.linear(features, weight, bias)
    return native_maps(features, (weight,), (bias,), (False,))


class NativeLinear(nn.Linear):
    """A linear layer whose product is `linear_map`."""

    def forward(self, input: Float[Tensor, "*batch inputs"]) -> Float[Tensor, "*batch outputs"]:
        return linear_map(input, self.weight, self.bias)


def native_(linear: nn.Linear) -> NativeLinear:
    """Converts a linear layer in place; its parameters and hooks remain."""
    # The class is changed, not the module: references to it, its parameters and its hooks remain valid.
    linear.__class__ = NativeLinear
    assert isinstance(linear, NativeLinear)
    return linear


def native_maps(
    features: Float[Tensor, "*batch inputs"],
    weights: Sequence[Float[Tensor, "outputs inputs"]],
    biases: Sequence[Float[Tensor, "outputs"] | None],
    gelus: Sequence[bool],
    joined: bool = False,
) -> Float[Tensor, "*batch outputs"]:
    """Returns the maps of the features, one after the other, with a GELU after those in `gelus`; float32, on a CPU.

    With `joined` all maps are of the features, and their outputs are concatenated. Only for inference: gradients are
    not recorded.

    Raises:
        NotSupported: The kernel cannot be built here.
        InvalidInput: Tensors that are not float32, or whose shapes do not fit.
    """
    require_inference((features,))
    return _NATIVE_MAPS(features, list(weights), list(biases), list(gelus), joined)


def described_maps(
    inputs: int,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    gelus: Sequence[bool],
    joined: bool = False,
) -> tuple[list[NativeMap], list[Tensor]]:
    """Returns what the kernel reads of maps of `inputs` features, and the tensors that must live during the call.

    Raises:
        InvalidInput: Tensors that are not float32 on a CPU, or whose shapes do not fit.
    """
    maps: list[NativeMap] = []
    buffers: list[Tensor] = []
    for weight, bias, gelu in zip(weights, biases, gelus, strict=True):
        outputs = weight.shape[0]
        fits = weight.ndim == 2 and weight.shape[1] == inputs and (bias is None or bias.shape == (outputs,))
        for tensor in (weight, weight if bias is None else bias):
            fits &= tensor.dtype == torch.float32 and tensor.is_cpu
        require_fitting(fits, weight, bias)
        weight = weight if weight.is_contiguous() else weight.contiguous()
        bias = bias if bias is None or bias.is_contiguous() else bias.contiguous()
        buffers += (weight,) if bias is None else (weight, bias)
        maps.append(NativeMap(weight.data_ptr(), 0 if bias is None else bias.data_ptr(), inputs, outputs, gelu))
        inputs = inputs if joined else outputs
    return maps, buffers


def _maps(
    features: Tensor, weights: list[Tensor], biases: list[Tensor | None], gelus: list[bool], joined: bool = False
) -> Tensor:
    library = required_library()
    require_fitting(features.ndim > 0 and len(weights) > 0 and features.dtype == torch.float32, features)
    features = features.contiguous()
    maps, _buffers = described_maps(features.shape[-1], weights, biases, gelus, joined)
    output = _empty(features, weights, biases, gelus, joined)
    count = output.numel() // max(output.shape[-1], 1)
    if not count:
        return output
    if library.attnrx_maps(
        (NativeMap * len(maps))(*maps), len(maps), joined, features.data_ptr(), features.shape[-1], count,
        output.data_ptr(), kernel_threads(),
    ):  # fmt: skip
        raise MemoryError("the linear maps found no memory for the features between them.")
    return output


def _empty(
    features: Tensor, weights: list[Tensor], biases: list[Tensor | None], gelus: list[bool], joined: bool = False
) -> Tensor:
    outputs = [len(weight) for weight in weights]
    return features.new_empty(*features.shape[:-1], sum(outputs) if joined else outputs[-1])


def _operations(features: torch.Size, weights: list[torch.Size], *_: object, **__: object) -> int:
    return 2 * (features.numel() // features[-1]) * sum(weight.numel() for weight in weights)


_NATIVE_MAPS = define(
    "native_maps(Tensor features, Tensor[] weights, Tensor?[] biases, bool[] gelus, bool joined=False) -> Tensor",
    _maps, _empty, _operations,
)  # fmt: skip
