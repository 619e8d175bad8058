"""A pre-norm block in C++ as one operator of PyTorch: norm, attention, residual sum, norm, MLP, residual sum."""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from attnrx.support.shapes import Float, Tensor, TokenBatch
from attnrx.vit.kernels.compilation import kernel_threads, required_library
from attnrx.vit.kernels.native_products import NativeMap, described_maps
from attnrx.vit.kernels.operators import define, is_observed, require_fitting, require_inference


class BlockTensors(NamedTuple):
    """What a block computes with.

    `vectors` are weight and bias of its first norm and of its second, then the factors of its two branches; `weights`
    and `biases` those of the maps of queries, keys, values and outputs, then those of the MLP, with a GELU after those
    in `gelus`; `scale` is the factor of the scores.
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
    """The tensors of a block as the kernel reads them, as long as each is where it was.

    A changed weight counts in the next call, because the kernel reads the tensors themselves; `is_current` notices one
    that is elsewhere or has another shape. `is_exact` states that none had to be copied.

    Raises:
        InvalidInput: Tensors that are not float32, or whose shapes do not fit.
    """

    def __init__(self, block: BlockTensors):
        self.block, self.width = block, block.weights[0].shape[1] if block.weights[0].ndim == 2 else 0
        require_fitting(_fits(block, self.width), *block.weights, *block.vectors)
        width, weights, biases, gelus = self.width, block.weights, block.biases, block.gelus
        # Queries, keys and values are maps of the tokens, the others of what the step before returns.
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
        """Whether every tensor is where it was, in its shape."""
        for tensor, address, shape, stride in self._facts:
            if tensor.data_ptr() != address or tensor.shape != shape or tensor.stride() != stride:
                return False
        return True

    def __call__(
        self, tokens: TokenBatch, sizes: Float[Tensor, "batch tokens"] | None, outputs: int, first_rows: bool
    ) -> tuple[Tensor, Tensor]:
        """Computes the block; see `native_block`."""
        library, tokens = required_library(), tokens.contiguous()
        images, count, width = tokens.shape
        fits = 0 <= outputs <= count and width == self.width and tokens.dtype == torch.float32
        fits &= sizes is None or (sizes.shape == (images, count) and sizes.dtype == torch.float32)
        require_fitting(fits, tokens, sizes)
        output, rows = _outputs(tokens, len(self.block.ranks), outputs, first_rows)
        if not output.numel():
            return output, rows.zero_()
        sizes = None if sizes is None else sizes.contiguous()
        # A copy, because other threads may call the block at the same time.
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
    """Returns the output of a block, and with `first_rows` the attention that its first token pays to all.

    It is x + factors[1] * mlp(norm(x)) with x = tokens + factors[0] * attention(norm(tokens)); float32, on a CPU.

    Keys are weighted by the `sizes` of their tokens. Only the first `outputs` tokens are computed (default: all). Only
    for inference: gradients are not recorded.

    Raises:
        NotSupported: The kernel cannot be built here.
        InvalidInput: Tensors that are not float32, or whose shapes do not fit.
    """
    require_inference((tokens, sizes))
    sizes, outputs = None if sizes is None else sizes.float(), tokens.shape[1] if outputs is None else outputs
    # PyTorch's dispatcher takes 50 us for the arguments of a block, of 1,400 us for 197 tokens of a ViT-Tiny.
    if is_observed(tokens):
        output, rows = _NATIVE_BLOCK(tokens, *block.block, sizes, outputs, first_rows)
    else:
        output, rows = block(tokens, sizes, outputs, first_rows)
    return output, rows if first_rows else None


def _block(tokens: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return KnownBlock(BlockTensors(*others[:-3]))(tokens, *others[-3:])


def _fits(block: BlockTensors, width: int) -> bool:
    """Whether the kernel reads within the bounds of these tensors; the maps are checked where they are described."""
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
    """Returns the output and the attention of the first token, without their numbers."""
    images, count, width = tokens.shape
    rows = tokens.new_empty(images if first_rows else 0, heads, count)
    return tokens.new_empty(images, outputs, width), rows


def _empty(tokens: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return _outputs(tokens, len(others[5]), *others[-2:])


def _operations(tokens: torch.Size, *others: Any, **_: object) -> int:
    (batch, count, _width), weights, (ranks, value_dims) = tokens, others[2], others[5:7]
    products = sum(weight.numel() for weight in weights)
    return 2 * batch * count * (products + count * (sum(ranks) + sum(value_dims)))


_NATIVE_BLOCK = define(
    "native_block(Tensor tokens, Tensor?[] vectors, float[] epsilons, Tensor[] weights, Tensor?[] biases, bool[] gelus,"
    " int[] ranks, int[] value_dims, float scale, Tensor? sizes, int outputs, bool first_rows) -> (Tensor, Tensor)",
    _block, _empty, _operations,
)  # fmt: skip
