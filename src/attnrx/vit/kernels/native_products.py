"""Linear maps in C++, one after the other, as one operator of PyTorch."""

import ctypes
from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import register_flop_formula

from attnrx.support.errors import InvalidInput
from attnrx.support.shapes import Float, Tensor
from attnrx.vit.kernels.compilation import kernel_threads, required_library
from attnrx.vit.kernels.native_attention import require_inference

_library = torch.library.Library("attnrx", "FRAGMENT")
_library.define(
    "native_maps(Tensor features, Tensor[] weights, Tensor[] biases, int[] outputs, bool[] gelus) -> Tensor"
)


class PackedMap:
    """The weight [outputs, inputs] of a linear map in the layout of the kernel, with its bias.

    Panels of neighbouring outputs follow one another, [inputs, outputs of the panel] each, padded with zeros.
    """

    def __init__(self, weight: Float[Tensor, "outputs inputs"], bias: Float[Tensor, "outputs"] | None):
        self.outputs = weight.shape[0]
        missing = padded_outputs(self.outputs) - self.outputs
        # The last panel may be one vector wide (`padded_outputs`): `split` makes it smaller than the others.
        panels = F.pad(weight.detach(), (0, 0, 0, missing)).split(_widths()[0])
        self.weight = torch.cat([panel.T.flatten() for panel in panels])
        # An empty tensor means no bias, because the lists of an operator have no optional elements.
        self.bias = weight.new_zeros(0) if bias is None else F.pad(bias.detach(), (0, missing))


# Outputs in a panel and in a vector register: the compiler decides them for the instructions of this CPU.
@lru_cache(maxsize=1)
def _widths() -> tuple[int, int]:
    library = required_library()
    return library.attnrx_panel(), library.attnrx_vector()


def native_maps(
    features: Float[Tensor, "*batch inputs"], maps: Sequence[PackedMap], gelus: Sequence[bool]
) -> Float[Tensor, "*batch outputs"]:
    """Returns the maps of the features, one after the other, with a GELU after those in `gelus`; float32, on a CPU.

    Only for inference: gradients are not recorded.

    Raises:
        NotSupported: The kernel cannot be built here.
        InvalidInput: Tensors that are not float32, or whose shapes do not fit.
    """
    require_inference((features,))
    weights, biases = [packed.weight for packed in maps], [packed.bias for packed in maps]
    return torch.ops.attnrx.native_maps.default(features, weights, biases, [packed.outputs for packed in maps], gelus)


def _maps(
    features: Tensor, weights: list[Tensor], biases: list[Tensor], outputs: list[int], gelus: list[bool]
) -> Tensor:
    library = required_library()
    if not features.ndim or not outputs:
        raise InvalidInput(f"{len(outputs)} maps of features {list(features.shape)}: give a map and rows of features.")
    features = features.contiguous()
    inputs = features.shape[-1]
    numbers: list[int] = []  # the structures `Map` of products.cpp
    dtypes = {features.dtype}
    for weight, bias, width, gelu in zip(weights, biases, outputs, gelus, strict=True):
        dtypes |= {weight.dtype, bias.dtype}
        if weight.numel() != inputs * padded_outputs(width):
            raise InvalidInput(f"a packed weight of {weight.numel()} numbers is no map from {inputs} to {width}.")
        numbers += (weight.data_ptr(), bias.data_ptr() if bias.numel() else 0, inputs, width, gelu)
        inputs = width
    if dtypes != {torch.float32}:
        raise InvalidInput(f"the product kernel reads float32; {', '.join(map(str, dtypes))} given.")
    output = _empty(features, weights, biases, outputs, gelus)
    count = output.numel() // max(inputs, 1)
    if not count:
        return output
    maps = (ctypes.c_int64 * len(numbers))(*numbers)
    if library.attnrx_maps(
        maps, len(outputs), features.data_ptr(), features.shape[-1], count, output.data_ptr(),
        kernel_threads(),
    ):  # fmt: skip
        raise MemoryError("the linear maps found no memory for the features between them.")
    return output


def padded_outputs(outputs: int) -> int:
    """Returns the outputs of a packed map, padding included."""
    # A remainder that fits one vector is padded to it, and not to the two vectors of a panel.
    panel, vector = _widths()
    rest = outputs % panel
    return outputs - rest + (0 if not rest else vector if rest <= vector else panel)


def _empty(
    features: Tensor, weights: list[Tensor], biases: list[Tensor], outputs: list[int], gelus: list[bool]
) -> Tensor:
    return features.new_empty(*features.shape[:-1], outputs[-1])


_library.impl("native_maps", _maps, "CPU")
_library.impl("native_maps", _empty, "Meta")


@register_flop_formula(torch.ops.attnrx.native_maps)
def _operations(
    features: torch.Size,
    weights: list[torch.Size],
    biases: list[torch.Size],
    outputs: Sequence[int],
    *_: object,
    **__: object,
) -> int:
    """Counts two operations per MAC, as PyTorch does."""
    return (
        2
        * (features.numel() // features[-1])
        * sum(a * b for a, b in zip((features[-1], *outputs[:-1]), outputs, strict=True))
    )
