"""The C++ kernel of one merging round as an operator of PyTorch."""

import ctypes

import torch

from attnrx.support.modules import is_recorded
from attnrx.support.shapes import Float, Int, Tensor, TokenBatch
from attnrx.vit.kernels.compilation import kernel_threads, native_library, required_library
from attnrx.vit.kernels.operators import define, require_fitting, require_inference

Merged = tuple[
    Float[Tensor, "batch left width"],
    Float[Tensor, "batch left"],
    Int[Tensor, "batch kept"],
    Int[Tensor, "batch patches"],
]
"""The remaining tokens, their sizes, the indices of the remaining patches, and the destinations of all patches."""


def can_merge(tokens: TokenBatch, patches: int, count: int) -> bool:
    """Whether the kernel merges these patches, to `count`: float32 on a CPU, one round, not recorded."""
    return (
        # One round merges at most the first set, of which an odd patch is a member: patches // 2 remain.
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
    """Merges to `count` patches in one round; the tokens before the patches, which have no `indices`, stay.

    Patches at even positions are merged into those at odd positions: by the cosine of their `keys`, or without keys by
    the smallest increase of squared error, in which patches count by their `weights` (default: their sizes); with
    `lengths` a merged patch then keeps the mean norm of its patches.

    Raises:
        NotSupported: The kernel cannot be built here.
        InvalidInput: Tensors that are not float32, or whose shapes do not fit.
    """
    require_inference((tokens, sizes, keys, weights))
    # Under autocast the keys have a lower precision than the tokens.
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
    # Without keys the patches themselves are compared, by squared distances (Ward).
    compared = tokens if keys is None else keys
    weights = sizes if weights is None else weights.to(sizes.dtype)
    (images, count), shapes = indices.shape, {sizes.shape, weights.shape, compared.shape[:2], tokens.shape[:2]}
    fits = len(shapes) == 1 and images == len(tokens) and 2 <= count <= tokens.shape[1]
    fits &= 0 < merged <= (count + 1) // 2 and not (lengths and keys is not None)
    fits &= tokens.dtype == sizes.dtype == compared.dtype == torch.float32 and indices.dtype == torch.int64
    require_fitting(fits, tokens, sizes, weights, compared, indices)
    outputs = _empty(tokens, sizes, indices, None, None, merged)
    # A row must be contiguous; a copy is kept until the kernel has returned.
    tokens = tokens if tokens.stride(2) == 1 else tokens.contiguous()
    compared = compared if compared.stride(2) == 1 else compared.contiguous()
    sizes, weights, indices = sizes.contiguous(), weights.contiguous(), indices.contiguous()
    # The fields of the structure `Merge` of merging.cpp, in their order.
    numbers = (
        tokens.data_ptr(), *tokens.stride()[:2], tokens.shape[2],
        compared.data_ptr(), *compared.stride()[:2], compared.shape[2],
        images, tokens.shape[1] - count, count, merged, keys is None, lengths,
        sizes.data_ptr(), weights.data_ptr(), indices.data_ptr(), *(output.data_ptr() for output in outputs),
    )  # fmt: skip
    if library.attnrx_merge((ctypes.c_int64 * len(numbers))(*numbers), kernel_threads()):
        raise MemoryError("token merging found no memory for the patches of one image.")
    return outputs


def _empty(
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


def _operations(
    tokens: torch.Size, sizes: torch.Size, indices: torch.Size, keys: torch.Size | None, *_: object, **__: object
) -> int:
    """Counts the products between the two sets."""
    patches, features = indices[1], (tokens if keys is None else keys)[2]
    return 2 * tokens[0] * (patches // 2) * ((patches + 1) // 2) * features


_NATIVE_MERGE = define(
    "native_merge(Tensor tokens, Tensor sizes, Tensor indices, Tensor? keys, Tensor? weights, int merged, bool lengths)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _merge, _empty, _operations,
)  # fmt: skip
