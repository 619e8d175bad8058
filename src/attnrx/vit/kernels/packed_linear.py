"""Linear maps with packed weights, for inference in float32 on a CPU.

A packed weight has the layout that the product reads: that of the C++ kernel, or without a compiler that of oneDNN.
The results are equal up to rounding.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import flop_registry, register_flop_formula

from attnrx.support.modules import is_recorded
from attnrx.support.shapes import Float, Tensor
from attnrx.vit.kernels.cached_weights import CachedWeights
from attnrx.vit.kernels.compilation import native_library
from attnrx.vit.kernels.native_products import PackedMap, native_maps

# The smallest product that is packed; for smaller ones the call itself takes longer than packing saves.
LEAST_MACS = 1_000_000
# The largest weight that is packed. A packed copy is valid as long as its weight has the same bytes, which are read in
# every call (`CachedWeights`); of larger weights that costs more than packing saves (docs/results/speed.md).
LARGEST = 1 << 18

# oneDNN's product with a packed weight; None in builds of PyTorch without oneDNN.
_product = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None


def is_packed(features: Float[Tensor, "*batch inputs"], weight: Float[Tensor, "outputs inputs"]) -> bool:
    """Whether the product with this weight uses a packed copy of it."""
    return (
        not is_recorded()  # first, because recorded sizes may be symbolic
        and features.numel() * weight.shape[0] >= LEAST_MACS
        and weight.numel() <= LARGEST
        and features.dtype == weight.dtype == torch.float32
        and features.device.type == weight.device.type == "cpu"
        # Subclasses (fake, distributed, quantized tensors) have products of their own.
        and type(features) is Tensor
        and type(weight) in (Tensor, nn.Parameter)
        and not torch.is_autocast_enabled("cpu")
        and (native_library() is not None or _product is not None)
    )


class LinearMap:
    """features @ weight^T + bias, for a weight that does not change; packed at the first use of the packed copy."""

    def __init__(self, weight: Float[Tensor, "outputs inputs"], bias: Float[Tensor, "outputs"] | None):
        self.weight, self.bias = weight, bias
        self._packed: PackedMap | Tensor | None = None

    def __call__(self, features: Float[Tensor, "*batch inputs"]) -> Float[Tensor, "*batch outputs"]:
        if not is_packed(features, self.weight):
            return F.linear(features, self.weight, self.bias)
        if native_library() is not None:
            return native_maps(features, (self.packed(),), (False,))
        if not isinstance(self._packed, Tensor):
            # Outside inference mode, as in `CachedWeights`: the copy outlives the call that makes it.
            with torch.inference_mode(mode=False), torch.no_grad():
                self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.contiguous(), None)
        assert _product is not None
        return _product.default(features, self._packed, self.bias, "none", [], "")

    def packed(self) -> PackedMap:
        """Returns the map for the C++ kernel."""
        if not isinstance(self._packed, PackedMap):
            with torch.inference_mode(mode=False), torch.no_grad():
                self._packed = PackedMap(self.weight, self.bias)
        return self._packed


class PackedLinear(nn.Linear):
    """A linear layer that computes with a packed copy of its weight where `is_packed`."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True):
        super().__init__(in_features, out_features, bias)
        self._kept: CachedWeights[LinearMap] = CachedWeights()

    def forward(self, input: Float[Tensor, "*batch inputs"]) -> Float[Tensor, "*batch outputs"]:
        if not is_packed(input, self.weight):
            return F.linear(input, self.weight, self.bias)
        return self.cached()(input)

    def cached(self) -> LinearMap:
        """Returns the map, from the cache where that is safe."""
        weight, bias = self.weight, self.bias
        return self._kept((), (weight, bias), lambda: LinearMap(weight, bias))


def packed_(linear: nn.Linear) -> PackedLinear:
    """Converts a linear layer in place; its parameters and hooks remain."""
    # The class is changed, not the module: references to it, its parameters and its hooks remain valid.
    linear.__class__ = PackedLinear
    assert isinstance(linear, PackedLinear)
    linear._kept = CachedWeights()
    return linear


if _product is not None and _product not in flop_registry:

    @register_flop_formula(_product)
    def _operations(features: torch.Size, weight: torch.Size, *_: object, **__: object) -> int:
        """Counts two operations per MAC, as PyTorch does."""
        return 2 * features.numel() * weight[0]
