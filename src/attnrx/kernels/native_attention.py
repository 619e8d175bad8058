"""The C++ kernel as an operator of PyTorch, visible to profilers, counters and meta tensors."""

import ctypes
from collections.abc import Sequence

import torch
from torch.utils.flop_counter import register_flop_formula

from attnrx.errors import InvalidInput
from attnrx.kernels.compilation import required_library
from attnrx.shapes import Float, Tensor

# The numbers that describe a head to the kernel (pointer and two strides each of query, key, value and output; rank
# and value dimension), and the bytes of a float.
DESCRIBED, FLOAT = 14, 4

_library = torch.library.Library("attnrx", "FRAGMENT")
_library.define(
    "native_joint_attention(Tensor features, int[] ranks, int[] reads, Tensor? sizes, float scale) -> Tensor"
)
_library.define(
    "native_mixed_attention(Tensor query, Tensor key, Tensor[] values, int[] ranks, Tensor mix, Tensor? sizes)"
    " -> Tensor"
)
_library.define(
    "native_attention(Tensor[] queries, Tensor[] keys, Tensor[] values, Tensor? sizes, float scale) -> Tensor"
)


def native_attention(
    queries: Sequence[Float[Tensor, "batch _ queries _"]],
    keys: Sequence[Float[Tensor, "batch _ keys _"]],
    values: Sequence[Float[Tensor, "batch _ keys _"]],
    sizes: Float[Tensor, "batch keys"] | None,
    scale: float,
) -> Float[Tensor, "batch queries features"]:
    """Returns softmax(scale * query @ key^T + log(sizes)) @ value of all heads, concatenated; float32, on a CPU.

    Every entry of the lists holds neighbouring heads of one shape; heads without query and key features return the mean
    of their values. Only for inference: gradients are not recorded.

    Raises:
        NotSupported: The kernel cannot be built here.
        InvalidInput: Tensors that are not float32, or whose shapes do not fit.
    """
    counted = None if sizes is None else sizes.float()
    return torch.ops.attnrx.native_attention.default(list(queries), list(keys), list(values), counted, scale)


def _attention(
    queries: list[Tensor], keys: list[Tensor], values: list[Tensor], sizes: Tensor | None, scale: float
) -> Tensor:
    library = required_library()
    _require_fitting(queries, keys, values, sizes)
    output = _empty(queries, keys, values, sizes, scale)
    if not values[0].shape[2]:  # softmax over no keys times no values
        return output.zero_()
    batch, tokens, _ = output.shape
    numbers, heads, _kept = _described(queries, keys, values, output)
    counted = None if sizes is None else sizes.contiguous()
    failed = library.attnrx_attention(
        numbers, heads, batch, tokens, values[0].shape[2],
        None if counted is None else counted.data_ptr(), scale, torch.get_num_threads(),
    )  # fmt: skip
    if failed:
        raise MemoryError("attention found no memory for the keys and values of one head.")
    return output


def _described(
    queries: list[Tensor], keys: list[Tensor], values: list[Tensor], output: Tensor
) -> tuple[ctypes.Array[ctypes.c_int64], int, list[Tensor]]:
    """Returns the numbers that describe the heads to the kernel, the number of heads, and the tensors that must live
    during the call: a contiguous copy may have no other owner.
    """
    kept: list[Tensor] = []
    described: list[int] = []
    place, (image, token, _) = output.data_ptr(), output.stride()
    for sides in zip(queries, keys, values, strict=True):
        own = [side if side.stride(-1) == 1 else side.contiguous() for side in sides]
        kept += own
        starts = [(side.data_ptr(), *side.stride()) for side in own]
        rank, reads = own[0].shape[3], own[2].shape[3]
        for head in range(own[2].shape[1]):
            for start, image_stride, stride, token_stride, _ in starts:
                described += (start + FLOAT * head * stride, image_stride, token_stride)
            described += (place, image, token, rank, reads)
            place += FLOAT * reads
    return (ctypes.c_int64 * len(described))(*described), len(described) // DESCRIBED, kept


def native_mixed_attention(
    query: Float[Tensor, "batch queries directions"],
    key: Float[Tensor, "batch keys directions"],
    values: Sequence[Float[Tensor, "batch _ keys _"]],
    ranks: Sequence[int],
    mix: Float[Tensor, "heads blocks"],
    sizes: Float[Tensor, "batch keys"] | None,
) -> Float[Tensor, "batch queries features"]:
    """Returns what `native_attention` does, for heads that mix the score maps of blocks.

    The score map of head h is sum_b mix[h, b] query_b @ key_b^T, where block b has the next `ranks[b]` directions. The
    map of a block is computed once for all heads.
    """
    counted = None if sizes is None else sizes.float()
    weights = mix.float().contiguous()
    return torch.ops.attnrx.native_mixed_attention.default(query, key, list(values), ranks, weights, counted)


def _mixed_attention(
    query: Tensor,
    key: Tensor,
    values: list[Tensor],
    ranks: Sequence[int],
    mix: Tensor,
    sizes: Tensor | None,
) -> Tensor:
    library = required_library()
    # Every head is described with the queries and keys of all directions.
    queries, keys = ([side[:, None].expand(-1, own.shape[1], -1, -1) for own in values] for side in (query, key))
    _require_fitting(queries, keys, values, sizes)
    output = _empty_mixed(query, key, values, ranks, mix, sizes)
    batch, tokens, _ = output.shape
    fits = mix.shape == (sum(own.shape[1] for own in values), len(ranks)) and min(ranks, default=0) >= 0
    if not fits or sum(ranks) != query.shape[2] or mix.dtype != torch.float32:
        raise InvalidInput(
            f"blocks of {list(ranks)} directions and a {mix.dtype} mix of {list(mix.shape)} do not fit "
            f"{query.shape[2]} directions and {sum(own.shape[1] for own in values)} heads in float32."
        )
    if not key.shape[1]:  # softmax over no keys times no values
        return output.zero_()
    numbers, heads, _kept = _described(queries, keys, values, output)
    counted, weights = None if sizes is None else sizes.contiguous(), mix.contiguous()
    failed = library.attnrx_mixed_attention(
        numbers, heads, (ctypes.c_int64 * len(ranks))(*ranks), weights.data_ptr(), len(ranks), batch, tokens,
        key.shape[1], None if counted is None else counted.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    if failed:
        raise MemoryError("attention found no memory for the keys and values of one image.")
    return output


def _empty_mixed(
    query: Tensor,
    key: Tensor,
    values: list[Tensor],
    ranks: Sequence[int],
    mix: Tensor,
    sizes: Tensor | None,
) -> Tensor:
    return query.new_empty(*query.shape[:2], sum([own.shape[1] * own.shape[3] for own in values]))


def _require_fitting(queries: list[Tensor], keys: list[Tensor], values: list[Tensor], sizes: Tensor | None) -> None:
    """Raises InvalidInput for shapes with which the kernel would read out of bounds."""
    (batch, _, tokens, _), length = queries[0].shape, values[0].shape[2]
    for query, key, value in zip(queries, keys, values, strict=True):
        heads, rank = value.shape[1], query.shape[3]
        shapes = (batch, heads, tokens, rank), (batch, heads, length, rank), (batch, heads, length, value.shape[3])
        if (query.shape, key.shape, value.shape) != shapes:
            found = f"{list(query.shape)}, {list(key.shape)} and {list(value.shape)}"
            raise InvalidInput(f"queries, keys and values of {found} are not those of the same heads and images.")
        if not query.dtype == key.dtype == value.dtype == torch.float32:
            raise InvalidInput(f"the attention kernel reads float32; {query.dtype}, {key.dtype}, {value.dtype} given.")
    if sizes is not None and (sizes.shape != (batch, length) or sizes.dtype != torch.float32):
        raise InvalidInput(f"sizes are float32 {[batch, length]} here, not {sizes.dtype} {list(sizes.shape)}.")


def _empty(
    queries: list[Tensor], keys: list[Tensor], values: list[Tensor], sizes: Tensor | None, scale: float
) -> Tensor:
    batch, _, tokens, _ = queries[0].shape
    return values[0].new_empty(batch, tokens, sum([own.shape[1] * own.shape[3] for own in values]))


def native_joint_attention(
    features: Float[Tensor, "batch tokens _"],
    ranks: Sequence[int],
    reads: Sequence[int],
    sizes: Float[Tensor, "batch tokens"] | None,
    scale: float,
) -> Float[Tensor, "batch tokens _"]:
    """Returns what `native_attention` does for features from one product: those of all queries, of all keys, and of all
    values, by head.

    `ranks` and `reads` are the rank and the value dimension of every head. This spares the views that separate the
    features, which take longer than the arithmetic for a few images.
    """
    counted = None if sizes is None else sizes.float()
    return torch.ops.attnrx.native_joint_attention.default(features, ranks, reads, counted, scale)


def _joint_attention(
    features: Tensor, ranks: Sequence[int], reads: Sequence[int], sizes: Tensor | None, scale: float
) -> Tensor:
    library = required_library()
    features = features.contiguous()
    batch, tokens, row = features.shape
    if row != 2 * sum(ranks) + sum(reads) or len(ranks) != len(reads):
        raise InvalidInput(f"{row} features are not those of heads with ranks {ranks} and value dimensions {reads}.")
    if features.dtype != torch.float32:
        raise InvalidInput(f"the attention kernel reads float32; {features.dtype} given.")
    if sizes is not None and (sizes.shape != (batch, tokens) or sizes.dtype != torch.float32):
        raise InvalidInput(f"sizes are float32 {[batch, tokens]} here, not {sizes.dtype} {list(sizes.shape)}.")
    output = _empty_joint(features, ranks, reads, sizes, scale)
    counted, numbers = None if sizes is None else sizes.contiguous(), ctypes.c_int64 * len(ranks)
    if library.attnrx_joint_attention(
        numbers(*ranks), numbers(*reads), len(ranks), features.data_ptr(), output.data_ptr(), batch, tokens,
        None if counted is None else counted.data_ptr(), scale, torch.get_num_threads(),
    ):  # fmt: skip
        raise MemoryError("attention found no memory for the keys and values of one head.")
    return output


def _empty_joint(
    features: Tensor, ranks: Sequence[int], reads: Sequence[int], sizes: Tensor | None, scale: float
) -> Tensor:
    return features.new_empty(*features.shape[:2], sum(reads))


_library.impl("native_joint_attention", _joint_attention, "CPU")
_library.impl("native_joint_attention", _empty_joint, "Meta")
_library.impl("native_mixed_attention", _mixed_attention, "CPU")
_library.impl("native_mixed_attention", _empty_mixed, "Meta")
_library.impl("native_attention", _attention, "CPU")
_library.impl("native_attention", _empty, "Meta")


@register_flop_formula(torch.ops.attnrx.native_attention)
def _operations(
    queries: list[torch.Size], keys: list[torch.Size], values: list[torch.Size], *_: object, **__: object
) -> int:
    """Counts the two products of every head as PyTorch does for attention: two operations per MAC."""
    total = 0
    for query, key, value in zip(queries, keys, values, strict=True):
        total += 2 * query[0] * value[1] * query[2] * key[2] * (query[3] + value[3])
    return total


@register_flop_formula(torch.ops.attnrx.native_mixed_attention)
def _mixed_operations(
    query: torch.Size,
    key: torch.Size,
    values: list[torch.Size],
    ranks: Sequence[int],
    mix: torch.Size,
    *_: object,
    **__: object,
) -> int:
    features = sum(value[1] * value[3] for value in values)
    return 2 * query[0] * query[1] * key[1] * (query[2] + mix[0] * mix[1] + features)


@register_flop_formula(torch.ops.attnrx.native_joint_attention)
def _joint_operations(
    features: torch.Size, ranks: Sequence[int], reads: Sequence[int], *_: object, **__: object
) -> int:
    batch, tokens = features[:2]
    return 2 * batch * tokens**2 * (sum(ranks) + sum(reads))
