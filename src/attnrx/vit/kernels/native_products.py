"""Operators for the C++ kernels that compute linear maps and whole pre-norm transformer blocks.

Linear maps run one after another (as in an MLP) or side by side (as for queries, keys and values). A block consists of
norm, attention, residual sum, norm, MLP and residual sum.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from attnrx.support.modules import is_recorded
from attnrx.support.shapes import Float, Tensor, TokenBatch
from attnrx.vit.kernels.compilation import (
    define,
    is_observed,
    kernel_threads,
    native_library,
    require_fitting,
    require_inference,
    required_library,
)

# The fewest MACs for which the kernel is used. For smaller products, calling the kernel costs more time than it saves.
LEAST_MACS = 1_000_000
# The fewest rows for which the kernel is used. It computes one row per vector lane, and AVX-512 registers have 16.
LEAST_ROWS = 16
# The most numbers in a weight for which the kernel is used. PyTorch is faster for larger ones (docs/results/speed.md).
LARGEST = 1 << 20


class NativeMap(ctypes.Structure):
    """A linear map, in the memory layout of the structure `Map` in columns.hpp."""

    _fields_ = [(name, ctypes.c_int64) for name in ("weight", "bias", "inputs", "outputs", "gelu")]


def may_run_natively(features: Float[Tensor, "*batch inputs"]) -> bool:
    """Whether the kernels support these features, i.e. whether this is float32 inference on a CPU."""
    # The device is checked first, because on other devices even these comparisons would delay the kernels.
    return features.device.type == "cpu" and features.dtype == torch.float32 and not is_recorded()


def runs_natively(features: Float[Tensor, "*batch inputs"], *weights: Float[Tensor, "_ _"]) -> bool:
    """Whether the kernel computes the products of these features and weights.

    The kernel is used for float32 inference on a CPU if the products are large enough.
    """
    return (
        may_run_natively(features)
        # Tensor subclasses (fake, distributed or quantized tensors) compute products in their own way.
        and type(features) is Tensor
        and features.numel() >= LEAST_ROWS * features.shape[-1]
        and features.numel() * sum([weight.shape[0] for weight in weights]) >= LEAST_MACS
        and all(map(is_native, weights))
        and not torch.is_autocast_enabled("cpu")
        and native_library() is not None
    )


def is_native(weight: Float[Tensor, "outputs inputs"]) -> bool:
    """Whether the kernel supports a weight. It must be a plain float32 tensor on a CPU that is not too large."""
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
    """Returns features @ weight^T + bias, computed by the C++ kernel if it can be used (`runs_natively`)."""
    if not runs_natively(features, weight):
        return F.linear(features, weight, bias)
    return native_maps(features, (weight,), (bias,), (False,))


class NativeLinear(nn.Linear):
    """A linear layer that uses the C++ kernel when the kernel supports the inputs (see `linear_map`)."""

    def forward(self, input: Float[Tensor, "*batch inputs"]) -> Float[Tensor, "*batch outputs"]:
        return linear_map(input, self.weight, self.bias)


def native_(linear: nn.Linear) -> NativeLinear:
    """Converts an `nn.Linear` to a `NativeLinear` in place. Its parameters and hooks do not change."""
    # Changing only the class keeps references to the module, its parameters and its hooks valid.
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
    """Applies several linear maps one after another, with a GELU after map i if `gelus[i]` is true.

    If `joined` is true, every map is applied to `features` itself instead, and the outputs are concatenated. The C++
    kernel requires float32 tensors on a CPU and records no gradients.

    Raises:
        NotSupported: The kernel cannot be built on this machine.
        InvalidInput: A tensor is not float32, or shapes do not match.
    """
    require_inference((features,))
    return _NATIVE_MAPS(features, list(weights), list(biases), list(gelus), joined)


def described_maps(
    inputs: int, weights: Sequence[Tensor], biases: Sequence[Tensor | None], gelus: Sequence[bool], joined: bool = False
) -> tuple[list[NativeMap], list[Tensor]]:
    """Returns a description of linear maps for the kernel, and the tensors that are described.

    The first map has `inputs` input features. Keep references to the returned tensors while the kernel runs.

    Raises:
        InvalidInput: A tensor is not float32 on a CPU, or shapes do not match.
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


class BlockTensors(NamedTuple):
    """The weights and settings of a transformer block, in the order that the C++ kernel expects.

    `vectors` contains the weight and bias of the first norm, the weight and bias of the second norm, and two vectors
    (LayerScale) that scale the outputs of attention and MLP. `weights` and `biases` belong to the query, key, value and
    output projections, followed by the MLP's maps. `gelus[i]` is true if a GELU follows map i. `scale` multiplies the
    attention scores.
    """

    vectors: list[Tensor | None]
    epsilons: list[float]
    weights: list[Tensor]
    biases: list[Tensor | None]
    gelus: list[bool]
    ranks: Sequence[int]
    value_dims: Sequence[int]
    scale: float


class _Norm(ctypes.Structure):
    _fields_ = [
        ("weight", ctypes.c_int64), ("bias", ctypes.c_int64), ("epsilon", ctypes.c_float), ("unused", ctypes.c_float)
    ]  # fmt: skip


class _Block(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("tokens", "output", "first_rows", "sizes", "images", "count", "outputs")),
        *((name, ctypes.c_int64) for name in ("width", "heads", "ranks", "reads", "maps", "mlp_maps")),
        ("norms", _Norm * 2), ("scales", ctypes.c_int64 * 2), ("scale", ctypes.c_float), ("unused", ctypes.c_float),
    ]  # fmt: skip


class KnownBlock:
    """A description of a block's tensors that is created once and used in many calls of the C++ kernel.

    The description contains memory addresses, so in-place changes of weights affect the next call. The description
    becomes invalid if a tensor moves or changes its shape, which `is_current` detects. `is_exact` is false if a tensor
    had to be copied. The kernel then does not see later changes to that tensor.

    Raises:
        InvalidInput: A tensor is not float32, or shapes do not match.
    """

    def __init__(self, block: BlockTensors):
        self.block, self.width = block, block.weights[0].shape[1] if block.weights[0].ndim == 2 else 0
        require_fitting(_block_fits(block, self.width), *block.weights, *block.vectors)
        width, weights, biases, gelus = self.width, block.weights, block.biases, block.gelus
        # The query, key and value maps all have the tokens as input. Each later map has the previous result as input.
        sides, buffers = described_maps(width, weights[:3], biases[:3], gelus[:3], joined=True)
        readout, others = described_maps(sum(block.value_dims), weights[3:4], biases[3:4], gelus[3:4])
        mlp, more = described_maps(width, weights[4:], biases[4:], gelus[4:])
        given = [tensor for tensor in (*weights, *biases, *block.vectors) if tensor is not None]
        self._facts = [(tensor, tensor.data_ptr(), tensor.shape, tensor.stride()) for tensor in given]
        self._maps = (NativeMap * len(weights))(*sides, *readout, *mlp)
        integers = ctypes.c_int64 * len(block.ranks)
        self._integers = integers(*block.ranks), integers(*block.value_dims)
        self._buffers = (*buffers, *others, *more)
        self.is_exact = all(any(each is tensor for tensor in given) for each in self._buffers)
        pointers = [0 if tensor is None else tensor.data_ptr() for tensor in block.vectors]
        described = _Block(
            width=width, heads=len(block.ranks), ranks=ctypes.addressof(self._integers[0]),
            reads=ctypes.addressof(self._integers[1]), maps=ctypes.addressof(self._maps), mlp_maps=len(mlp),
            norms=(_Norm(*pointers[:2], block.epsilons[0]), _Norm(*pointers[2:4], block.epsilons[1])),
            scales=(pointers[4], pointers[5]), scale=block.scale,
        )  # fmt: skip
        self._described = bytes(described)

    def is_current(self) -> bool:
        """Whether every tensor still has the same address, shape and strides as when it was described."""
        for tensor, address, shape, stride in self._facts:
            if tensor.data_ptr() != address or tensor.shape != shape or tensor.stride() != stride:
                return False
        return True

    def __call__(
        self, tokens: TokenBatch, sizes: Float[Tensor, "batch tokens"] | None, outputs: int, first_rows: bool
    ) -> tuple[Tensor, Tensor]:
        """Runs the kernel and returns the block's output and the first token's attention (see `native_block`)."""
        library, tokens = required_library(), tokens.contiguous()
        images, count, width = tokens.shape
        fits = 0 <= outputs <= count and width == self.width and tokens.dtype == torch.float32
        fits &= sizes is None or (sizes.shape == (images, count) and sizes.dtype == torch.float32)
        require_fitting(fits, tokens, sizes)
        output, rows = _outputs(tokens, len(self.block.ranks), outputs, first_rows)
        if not output.numel():
            return output, rows.zero_()
        sizes = None if sizes is None else sizes.contiguous()
        # Each call fills in its own copy, because other threads may call the block at the same time.
        described = _Block.from_buffer_copy(self._described)
        described.tokens, described.output = tokens.data_ptr(), output.data_ptr()
        described.images, described.count, described.outputs = images, count, outputs
        if first_rows:
            described.first_rows = rows.data_ptr()
        if sizes is not None:
            described.sizes = sizes.data_ptr()
        if library.attnrx_block(ctypes.byref(described), kernel_threads()):
            raise MemoryError("a block found no memory for the features of one image.")
        return output, rows


def native_block(
    tokens: TokenBatch,
    block: KnownBlock,
    sizes: Float[Tensor, "batch tokens"] | None,
    outputs: int | None = None,
    first_rows: bool = False,
) -> tuple[Float[Tensor, "batch outputs width"], Float[Tensor, "batch heads tokens"] | None]:
    """Returns a block's output and, if `first_rows` is true, the first token's attention to all tokens.

    The output is x + b * mlp(norm2(x)), where x = tokens + a * attention(norm1(tokens)), and a and b are the LayerScale
    vectors (1 if there are none). The C++ kernel requires float32 tensors on a CPU and records no gradients.

    Args:
        tokens: The block's input.
        block: The block's weights.
        sizes: The number of original tokens that each token represents, which weights the token's key. None means that
            every token represents one original token.
        outputs: The number of tokens to compute, starting with the first. None means all tokens.
        first_rows: Whether to return the first token's attention in every head.

    Raises:
        NotSupported: The kernel cannot be built on this machine.
        InvalidInput: A tensor is not float32, or shapes do not match.
    """
    require_inference((tokens, sizes))
    sizes, outputs = None if sizes is None else sizes.float(), tokens.shape[1] if outputs is None else outputs
    # If nothing observes operators, the kernel is called directly, without PyTorch's dispatch. For a ViT-Tiny block
    # with 197 tokens, the dispatch would take 50 of 1,400 us.
    if is_observed(tokens):
        output, rows = _NATIVE_BLOCK(tokens, *block.block, sizes, outputs, first_rows)
    else:
        output, rows = block(tokens, sizes, outputs, first_rows)
    return output, rows if first_rows else None


def _block_fits(block: BlockTensors, width: int) -> bool:
    """Whether shapes and dtypes match, so that the kernel reads no memory beyond these tensors.

    The inputs of every map are checked by `described_maps`.
    """
    outputs, ranks, value_dims = [weight.shape[0] for weight in block.weights], block.ranks, block.value_dims
    directions, features = sum(ranks), sum(value_dims)
    fits = len(outputs) > 4 and outputs[:4] == [directions, directions, features, width] and outputs[-1] == width
    fits &= len(block.vectors) == 6 and len(ranks) == len(value_dims)
    for vector in block.vectors:
        fits &= vector is None or (
            vector.shape == (width,) and vector.dtype == torch.float32 and vector.is_contiguous()
        )
    return fits


def _outputs(tokens: TokenBatch, heads: int, outputs: int, first_rows: bool) -> tuple[Tensor, Tensor]:
    """Returns uninitialized tensors for the block's output and for the first token's attention."""
    images, count, width = tokens.shape
    rows = tokens.new_empty(images if first_rows else 0, heads, count)
    return tokens.new_empty(images, outputs, width), rows


def _block_operations(tokens: torch.Size, *others: Any, **_: object) -> int:
    (batch, count, _width), weights, (ranks, value_dims) = tokens, others[2], others[5:7]
    products = sum(weight.numel() for weight in weights)
    return 2 * batch * count * (products + count * (sum(ranks) + sum(value_dims)))


_NATIVE_BLOCK = define(
    "native_block(Tensor tokens, Tensor?[] vectors, float[] epsilons, Tensor[] weights, Tensor?[] biases, bool[] gelus,"
    " int[] ranks, int[] value_dims, float scale, Tensor? sizes, int outputs, bool first_rows) -> (Tensor, Tensor)",
    lambda tokens, *others: KnownBlock(BlockTensors(*others[:-3]))(tokens, *others[-3:]),
    lambda tokens, *others: _outputs(tokens, len(others[5]), *others[-2:]),
    _block_operations,
)  # fmt: skip
