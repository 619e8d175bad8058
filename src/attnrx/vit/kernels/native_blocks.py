"""A pre-norm block in C++ as one operator of PyTorch: norm, attention, residual sum, norm, MLP, residual sum."""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from attnrx.support.shapes import Float, Tensor, TokenBatch
from attnrx.vit.kernels.compilation import kernel_threads, required_library
from attnrx.vit.kernels.native_products import NativeMap, described_maps
from attnrx.vit.kernels.operators import define, require_fitting, require_inference


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


def native_block(
    tokens: TokenBatch,
    block: BlockTensors,
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
    sizes = None if sizes is None else sizes.float().contiguous()
    outputs = tokens.shape[1] if outputs is None else outputs
    output, rows = _NATIVE_BLOCK(tokens, *block, sizes, outputs, first_rows)
    return output, rows if first_rows else None


def _block(  # noqa: PLR0913, the arguments of the operator
    tokens: Tensor,
    vectors: list[Tensor | None],
    epsilons: list[float],
    weights: list[Tensor],
    biases: list[Tensor | None],
    gelus: list[bool],
    ranks: list[int],
    value_dims: list[int],
    scale: float,
    sizes: Tensor | None,
    outputs: int,
    first_rows: bool,
) -> tuple[Tensor, Tensor]:
    library = required_library()
    tokens = tokens.contiguous()
    images, count, width = tokens.shape
    directions, features, maps_of = sum(ranks), sum(value_dims), [weight.shape[0] for weight in weights]
    fits = len(maps_of) > 4 and maps_of[:4] == [directions, directions, features, width] and maps_of[-1] == width
    fits &= 0 <= outputs <= count and len(vectors) == 6 and len(ranks) == len(value_dims)
    fits &= tokens.dtype == torch.float32 and (sizes is None or sizes.shape == (images, count))
    for vector in vectors:
        fits &= vector is None or vector.shape == (width,)
    for vector in (*vectors, sizes):
        fits &= vector is None or (vector.dtype == torch.float32 and vector.is_contiguous())
    require_fitting(fits, tokens, *weights, *vectors, sizes)
    output, rows = _empty(tokens, vectors, epsilons, weights, biases, gelus, ranks, *[None] * 3, outputs, first_rows)
    if not output.numel():
        return output, rows.zero_()
    # Queries, keys and values are maps of the tokens, the others of what the step before returns.
    sides, buffers = described_maps(width, weights[:3], biases[:3], gelus[:3], joined=True)
    readout, others = described_maps(sum(value_dims), weights[3:4], biases[3:4], gelus[3:4])
    mlp, more = described_maps(width, weights[4:], biases[4:], gelus[4:])
    maps = (NativeMap * len(weights))(*sides, *readout, *mlp)
    integers = ctypes.c_int64 * len(ranks)
    all_ranks, all_dims = integers(*ranks), integers(*value_dims)
    buffers += (*others, *more)
    pointers = [0 if tensor is None else tensor.data_ptr() for tensor in (*vectors, sizes)]
    described = _Block(
        tokens.data_ptr(), output.data_ptr(), rows.data_ptr() if first_rows else 0, pointers[6],
        images, count, outputs, width, len(ranks),
        ctypes.addressof(all_ranks), ctypes.addressof(all_dims), ctypes.addressof(maps), len(mlp),
        (_Norm(pointers[0], pointers[1], epsilons[0]), _Norm(pointers[2], pointers[3], epsilons[1])),
        (pointers[4], pointers[5]), scale,
    )  # fmt: skip
    if library.attnrx_block(ctypes.byref(described), kernel_threads()):
        raise MemoryError("a block found no memory for the features of one image.")
    return output, rows


def _empty(tokens: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    ranks, (outputs, first_rows) = others[5], others[-2:]
    images, count, width = tokens.shape
    rows = tokens.new_empty(images if first_rows else 0, len(ranks), count)
    return tokens.new_empty(images, outputs, width), rows


def _operations(tokens: torch.Size, *others: Any, **_: object) -> int:
    (batch, count, _width), weights, (ranks, value_dims) = tokens, others[2], others[5:7]
    products = sum(weight.numel() for weight in weights)
    return 2 * batch * count * (products + count * (sum(ranks) + sum(value_dims)))


_NATIVE_BLOCK = define(
    "native_block(Tensor tokens, Tensor?[] vectors, float[] epsilons, Tensor[] weights, Tensor?[] biases, bool[] gelus,"
    " int[] ranks, int[] value_dims, float scale, Tensor? sizes, int outputs, bool first_rows) -> (Tensor, Tensor)",
    _block, _empty, _operations,
)  # fmt: skip
