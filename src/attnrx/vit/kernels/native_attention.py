"""Operators for the C++ kernels that compute attention and merge tokens."""

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from attnrx.support.modules import is_recorded
from attnrx.support.shapes import Float, Int, Tensor, TokenBatch
from attnrx.vit.kernels.compilation import (
    address,
    define,
    kernel_threads,
    native_library,
    require_fitting,
    require_inference,
    required_library,
)

# DESCRIBED is how many numbers describe a head to the kernel: an address and two strides each for query, key, value and
# output, then rank and value dimension. FLOAT is the size of a float in bytes.
DESCRIBED, FLOAT = 14, 4


class RotationTable(NamedTuple):
    """Rotary positions in the format of the C++ kernel.

    `pairs` contains three integers per head: the first table column of the head's pairs, the number of its pairs, and
    the number of unrotated rows before its pairs. The list contains the first integer of every head, then the second
    of every head, then the third. The last entry of the list is the number of tokens before the patches.
    """

    cosines: Float[Tensor, "images patches columns"]
    sines: Float[Tensor, "images patches columns"]
    pairs: list[int]


class JointFeatures(NamedTuple):
    """The queries, keys and values of all heads in one tensor, as a joint projection computes them.

    `features` contains the queries of all heads, then all keys, then all values. `rows` contains the number of query
    and key features per head, and `value_dims` the number of value features per head. If `rotation` is not None, the
    kernel rotates queries and keys by it. If `bias` is not None, the kernel adds it to the scores.
    """

    features: Float[Tensor, "batch tokens _"]
    rows: Sequence[int]
    value_dims: Sequence[int]
    scale: float
    rotation: RotationTable | None = None
    bias: Float[Tensor, "images heads tokens tokens"] | None = None


def native_attention(
    queries: Sequence[Float[Tensor, "batch _ queries _"]],
    keys: Sequence[Float[Tensor, "batch _ keys _"]],
    values: Sequence[Float[Tensor, "batch _ keys _"]],
    sizes: Float[Tensor, "batch keys"] | None,
    scale: float,
    bias: Float[Tensor, "images heads queries keys"] | None = None,
) -> Float[Tensor, "batch queries features"]:
    """Returns softmax(scale * query @ key^T + bias + log(sizes)) @ value for all heads, concatenated.

    The C++ kernel requires float32 tensors on a CPU and records no gradients. Each entry of `queries`, `keys` and
    `values` contains neighbouring heads of the same shape. For heads without query and key features, the output is the
    mean of the values.

    Raises:
        NotSupported: The kernel cannot be built on this machine.
        InvalidInput: A tensor is not float32, or shapes do not match.
    """
    require_inference((*queries, *keys, *values, sizes, bias))
    token_sizes = None if sizes is None else sizes.float()
    return _NATIVE_ATTENTION(list(queries), list(keys), list(values), token_sizes, scale, bias)


def _attention(
    queries: list[Tensor],
    keys: list[Tensor],
    values: list[Tensor],
    sizes: Tensor | None,
    scale: float,
    bias: Tensor | None = None,
) -> Tensor:
    library = required_library()
    require_heads(queries, keys, values, sizes)
    output = _empty(queries, keys, values)
    if not values[0].shape[2]:  # attention without keys is zero
        return output.zero_()
    batch, tokens, _ = output.shape
    numbers, heads, _buffers = described_heads(queries, keys, values, output)
    sizes = None if sizes is None else sizes.contiguous()
    bias = None if bias is None else bias.float().contiguous()
    bias_pointer = _described_bias(bias, (batch, heads, tokens, values[0].shape[2]))
    if library.attnrx_attention(
        numbers, heads, batch, tokens, values[0].shape[2], address(sizes), scale, kernel_threads(), None, bias_pointer
    ):
        raise MemoryError("attention found no memory for the keys and values of one head.")
    return output


def described_heads(
    queries: Sequence[Float[Tensor, "batch _ queries _"]],
    keys: Sequence[Float[Tensor, "batch _ keys _"]],
    values: Sequence[Float[Tensor, "batch _ keys _"]],
    output: Float[Tensor, "batch queries features"],
) -> tuple[ctypes.Array[ctypes.c_int64], int, list[Tensor]]:
    """Returns a description of all heads for the kernel, the number of heads, and the tensors that are described.

    Keep references to these tensors while the kernel runs. Some are contiguous copies to which nothing else refers.
    """
    buffers: list[Tensor] = []
    numbers: list[int] = []
    # Addresses are in bytes, strides in floats. The features of a token must be contiguous. Images and tokens may have
    # any stride.
    start_of_output, (image, token, _) = output.data_ptr(), output.stride()
    for sides in zip(queries, keys, values, strict=True):
        # `sides` contains query, key and value of neighbouring heads, [batch, heads, tokens, features] each.
        group = [side if side.stride(-1) == 1 else side.contiguous() for side in sides]
        buffers += group
        starts = [(side.data_ptr(), *side.stride()) for side in group]
        rank, value_dim = group[0].shape[3], group[2].shape[3]
        for head in range(group[2].shape[1]):
            for start, image_stride, stride, token_stride, _ in starts:
                numbers += (start + FLOAT * head * stride, image_stride, token_stride)
            numbers += (start_of_output, image, token, rank, value_dim)
            start_of_output += FLOAT * value_dim  # the output contains the heads side by side
    return (ctypes.c_int64 * len(numbers))(*numbers), len(numbers) // DESCRIBED, buffers


def require_heads(
    queries: Sequence[Float[Tensor, "*_"]],
    keys: Sequence[Float[Tensor, "*_"]],
    values: Sequence[Float[Tensor, "*_"]],
    sizes: Float[Tensor, "*_"] | None,
) -> None:
    """Raises InvalidInput if dtypes or shapes do not match, because the kernel would then read beyond the tensors."""
    all_sides = (*queries, *keys, *values)
    fits = len(queries) == len(keys) == len(values) > 0 and {side.ndim for side in all_sides} == {4}
    if fits:
        (batch, _, tokens, _), length = queries[0].shape, values[0].shape[2]
        for query, key, value in zip(queries, keys, values, strict=True):
            heads, rank = value.shape[1], query.shape[3]
            shapes = (batch, heads, tokens, rank), (batch, heads, length, rank), (batch, heads, length, value.shape[3])
            fits &= (query.shape, key.shape, value.shape) == shapes
            fits &= query.dtype == key.dtype == value.dtype == torch.float32
        fits &= _fit(sizes, batch, length)
    require_fitting(fits, *all_sides, sizes)


def _fit(sizes: Tensor | None, batch: int, length: int) -> bool:
    return sizes is None or (sizes.shape == (batch, length) and sizes.dtype == torch.float32)


# The fields of the next two structures must match `Bias` and `Rotation` in attention.cpp in order and type.
class _Bias(ctypes.Structure):
    _fields_ = (("values", ctypes.c_void_p), ("image", ctypes.c_int64), ("head", ctypes.c_int64))


class _Rotation(ctypes.Structure):
    _fields_ = (
        ("cosines", ctypes.c_void_p),
        ("sines", ctypes.c_void_p),
        ("image", ctypes.c_int64),
        ("patch", ctypes.c_int64),
        ("columns", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("stills", ctypes.c_void_p),
        ("prefix", ctypes.c_int),
    )


def _described_bias(bias: Tensor | None, shape: tuple[int, int, int, int]) -> Any:
    """Returns a pointer to the kernel's description of a contiguous bias, or None if `bias` is None."""
    if bias is None:
        return None
    require_fitting(bias.shape[0] in (1, shape[0]) and tuple(bias.shape[1:]) == shape[1:], bias)
    # With stride 0, all images share one bias. `byref` keeps the structure alive, and the caller keeps the tensor.
    image = 0 if bias.shape[0] == 1 else bias.stride(0)
    return ctypes.byref(_Bias(bias.data_ptr(), image, bias.stride(1)))


def native_joint_attention(
    joint: JointFeatures, sizes: Float[Tensor, "batch tokens"] | None
) -> Float[Tensor, "batch tokens _"]:
    """Computes the outputs of `native_attention` for jointly projected queries, keys and values.

    The kernel reads the joint features directly. If there are few images, creating a view for every head would take
    longer than the arithmetic. If there is a `rotation`, the kernel first rotates the queries and keys of the patches.
    """
    features, rows, value_dims, scale, rotation, bias = joint
    require_inference((features, sizes, bias))
    token_sizes = None if sizes is None else sizes.float()
    cosines, sines, pairs = (None, None, []) if rotation is None else rotation
    return _NATIVE_JOINT_ATTENTION(features, rows, value_dims, token_sizes, scale, cosines, sines, pairs, bias)


def _joint_attention(
    features: Tensor,
    ranks: Sequence[int],
    value_dims: Sequence[int],
    sizes: Tensor | None,
    scale: float,
    cosines: Tensor | None = None,
    sines: Tensor | None = None,
    pairs: Sequence[int] = (),
    bias: Tensor | None = None,
) -> Tensor:
    library = required_library()
    features = features.contiguous()
    require_fitting(features.ndim == 3 and features.dtype == torch.float32, features)
    batch, tokens, row = features.shape
    fits = row == 2 * sum(ranks) + sum(value_dims) and len(ranks) == len(value_dims)
    require_fitting(fits and _fit(sizes, batch, tokens), features, sizes)
    output = _empty_joint(features, ranks, value_dims)
    sizes, numbers = None if sizes is None else sizes.contiguous(), ctypes.c_int64 * len(ranks)
    rotation = None
    if cosines is not None and sines is not None:
        heads, prefix = len(ranks), pairs[-1]
        cosines, sines = cosines.contiguous(), sines.contiguous()
        # PyTorch operators accept no nested lists, so `pairs` is a flat list of integers (see `RotationTable`).
        columns, counts, stills = (numbers(*pairs[start : start + heads]) for start in range(0, 3 * heads, heads))
        fits = all(
            0 <= column and column + count <= cosines.shape[2] and 0 <= still and still + 2 * count <= rank
            for column, count, still, rank in zip(columns, counts, stills, ranks, strict=True)
        )
        fits &= cosines.shape == sines.shape and cosines.dtype == sines.dtype == torch.float32
        fits &= cosines.shape[0] in (1, batch) and cosines.shape[1] == tokens - prefix
        require_fitting(fits, cosines, sines)
        image = 0 if cosines.shape[0] == 1 else cosines.stride(0)
        # The structure contains only addresses. Local variables keep the arrays and tables alive until the call
        # returns.
        addresses = [ctypes.addressof(array) for array in (columns, counts, stills)]
        rotation = ctypes.byref(
            _Rotation(cosines.data_ptr(), sines.data_ptr(), image, cosines.stride(1), *addresses, prefix)
        )
    bias = None if bias is None else bias.float().contiguous()
    if library.attnrx_joint_attention(
        numbers(*ranks), numbers(*value_dims), len(ranks), features.data_ptr(), output.data_ptr(), batch, tokens,
        address(sizes), scale, kernel_threads(), rotation, _described_bias(bias, (batch, len(ranks), tokens, tokens)),
    ):  # fmt: skip
        raise MemoryError("attention found no memory for the keys and values of one head.")
    return output


def num_features(values: Iterable[torch.Size]) -> int:
    """Returns the total number of value features over all heads, given the shapes of the value tensors."""
    return sum([heads * value_dim for _, heads, _, value_dim in values])


def _empty(queries: list[Tensor], keys: object, values: list[Tensor], *_: object) -> Tensor:
    batch, tokens = queries[0].shape[0], queries[0].shape[2]
    return values[0].new_empty(batch, tokens, num_features(value.shape for value in values))


def _empty_joint(features: Tensor, ranks: Sequence[int], value_dims: Sequence[int], *_: object) -> Tensor:
    return features.new_empty(*features.shape[:2], sum(value_dims))


def _operations(
    queries: list[torch.Size], keys: list[torch.Size], values: list[torch.Size], *_: object, **__: object
) -> int:
    """Returns the number of floating-point operations in the two matrix products of attention, over all heads."""
    sides = zip(queries, keys, values, strict=True)
    return sum(2 * query[0] * value[1] * query[2] * key[2] * (query[3] + value[3]) for query, key, value in sides)


def _joint_operations(
    features: torch.Size, ranks: Sequence[int], value_dims: Sequence[int], *_: object, **__: object
) -> int:
    batch, tokens = features[:2]
    return 2 * batch * tokens**2 * (sum(ranks) + sum(value_dims))


_NATIVE_ATTENTION = define(
    "native_attention(Tensor[] queries, Tensor[] keys, Tensor[] values, Tensor? sizes, float scale, Tensor? bias=None)"
    " -> Tensor",
    _attention, _empty, _operations,
)  # fmt: skip
_NATIVE_JOINT_ATTENTION = define(
    "native_joint_attention(Tensor features, int[] ranks, int[] value_dims, Tensor? sizes, float scale, "
    "Tensor? cosines=None, Tensor? sines=None, int[] pairs=[], Tensor? bias=None) -> Tensor",
    _joint_attention, _empty_joint, _joint_operations,
)  # fmt: skip


Merged = tuple[
    Float[Tensor, "batch left width"],
    Float[Tensor, "batch left"],
    Int[Tensor, "batch kept"],
    Int[Tensor, "batch patches"],
]
"""The result of a merging round: the remaining tokens, their sizes, the indices of the remaining patches, and the
destination of every patch (the remaining patch that represents it)."""


def can_merge(tokens: TokenBatch, patches: int, count: int) -> bool:
    """Whether the kernel supports these tokens, and can reduce `patches` patches to `count` patches in one round."""
    return (
        # A round can merge all patches at even positions, so at least patches // 2 remain.
        patches // 2 <= count < patches
        and patches > 1
        and tokens.dtype == torch.float32
        and tokens.device.type == "cpu"
        and not is_recorded()
        and native_library() is not None
    )


def native_merge(
    tokens: TokenBatch,
    sizes: Float[Tensor, "batch tokens"],
    indices: Int[Tensor, "batch patches"],
    keys: Float[Tensor, "batch tokens directions"] | None,
    count: int,
    lengths: bool = False,
    weights: Float[Tensor, "batch tokens"] | None = None,
) -> Merged:
    """Merges patches until `count` remain, in one round of bipartite matching. Tokens before the patches are kept.

    Every patch at an even position is matched with a patch at an odd position, and the best matches are merged. A match
    is rated by the cosine similarity of the two patches' `keys`. If `keys` is None, it is rated by how much merging
    would increase the squared error, with patches weighted by `weights` (by default `sizes`). If `lengths` is true, a
    merged patch is rescaled to the mean norm of the patches in it.

    Raises:
        NotSupported: The kernel cannot be built on this machine.
        InvalidInput: A tensor is not float32, or shapes do not match.
    """
    require_inference((tokens, sizes, keys, weights))
    # Under autocast, the keys have a lower precision than the tokens.
    keys = None if keys is None else keys.to(tokens.dtype)
    return _NATIVE_MERGE(tokens, sizes, indices, keys, weights, indices.shape[1] - count, lengths)


def _merge(
    tokens: Tensor,
    sizes: Tensor,
    indices: Tensor,
    keys: Tensor | None,
    weights: Tensor | None,
    merged: int,
    lengths: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    library = required_library()
    # If there are no keys, the kernel compares the patches by squared distances (Ward's method).
    compared = tokens if keys is None else keys
    weights = sizes if weights is None else weights.to(sizes.dtype)
    (images, count), shapes = indices.shape, {sizes.shape, weights.shape, compared.shape[:2], tokens.shape[:2]}
    fits = len(shapes) == 1 and images == len(tokens) and 2 <= count <= tokens.shape[1]
    fits &= 0 < merged <= (count + 1) // 2 and not (lengths and keys is not None)
    fits &= tokens.dtype == sizes.dtype == compared.dtype == torch.float32 and indices.dtype == torch.int64
    require_fitting(fits, tokens, sizes, weights, compared, indices)
    outputs = _empty_merged(tokens, sizes, indices, None, None, merged)
    # The kernel needs contiguous rows. Local variables keep copies alive until the kernel returns.
    tokens = tokens if tokens.stride(2) == 1 else tokens.contiguous()
    compared = compared if compared.stride(2) == 1 else compared.contiguous()
    sizes, weights, indices = sizes.contiguous(), weights.contiguous(), indices.contiguous()
    # These numbers are the fields of the structure `Merge` in merging.cpp, in the same order.
    numbers = (
        tokens.data_ptr(), *tokens.stride()[:2], tokens.shape[2],
        compared.data_ptr(), *compared.stride()[:2], compared.shape[2],
        images, tokens.shape[1] - count, count, merged, keys is None, lengths,
        sizes.data_ptr(), weights.data_ptr(), indices.data_ptr(), *(output.data_ptr() for output in outputs),
    )  # fmt: skip
    if library.attnrx_merge((ctypes.c_int64 * len(numbers))(*numbers), kernel_threads()):
        raise MemoryError("token merging found no memory for the patches of one image.")
    return outputs


def _empty_merged(
    tokens: Tensor, sizes: Tensor, indices: Tensor, keys: object, weights: object, merged: int, *_: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, count, width = tokens.shape
    left = count - merged
    return (
        tokens.new_empty(batch, left, width),
        sizes.new_empty(batch, left),
        indices.new_empty(batch, indices.shape[1] - merged),
        indices.new_empty(indices.shape),
    )


def _merge_operations(
    tokens: torch.Size, sizes: torch.Size, indices: torch.Size, keys: torch.Size | None, *_: object, **__: object
) -> int:
    """Returns the number of operations for comparing every patch at an even position with every patch at an odd one."""
    patches, features = indices[1], (tokens if keys is None else keys)[2]
    return 2 * tokens[0] * (patches // 2) * ((patches + 1) // 2) * features


_NATIVE_MERGE = define(
    "native_merge(Tensor tokens, Tensor sizes, Tensor indices, Tensor? keys, Tensor? weights, int merged, bool lengths)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _merge, _empty_merged, _merge_operations,
)  # fmt: skip
