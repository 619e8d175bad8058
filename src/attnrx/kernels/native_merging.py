"""The C++ kernel of one merging round as an operator of PyTorch."""

import ctypes

import torch
from torch.utils.flop_counter import register_flop_formula

from attnrx.errors import InvalidInput
from attnrx.kernels.compilation import native_library, required_library
from attnrx.shapes import Float, Int, Tensor

Merged = tuple[Float[Tensor, "batch count width"], Float[Tensor, "batch count"], Int[Tensor, "batch count"]]
"""The remaining patches, their sizes, and their indices."""

_library = torch.library.Library("attnrx", "FRAGMENT")
_library.define(
    "native_merge(Tensor patches, Tensor sizes, Tensor? keys, int merged, bool lengths) -> (Tensor, Tensor, Tensor)"
)


def can_merge(patches: Float[Tensor, "batch patches width"], count: int) -> bool:
    """Whether the kernel merges these patches to `count`: float32 on a CPU, one round, nothing of it is recorded."""
    recorded = torch.compiler.is_compiling() or torch.is_grad_enabled() or torch.jit.is_tracing()
    return (
        not recorded
        and patches.device.type == "cpu"
        and patches.dtype == torch.float32
        and patches.shape[1] // 2 <= count < patches.shape[1]
        and native_library() is not None
    )


def native_merge(
    patches: Float[Tensor, "batch patches width"],
    sizes: Float[Tensor, "batch patches"],
    keys: Float[Tensor, "batch patches directions"] | None,
    count: int,
    lengths: bool = False,
) -> Merged:
    """Merges to `count` patches in one round.

    Patches at even positions are merged into those at odd positions: by the cosine of their `keys`, or without keys by
    the smallest increase of squared error; with `lengths` a merged patch then keeps the mean norm of its patches.

    Raises:
        NotSupported: The kernel cannot be built here.
        InvalidInput: Tensors that are not float32, or whose shapes do not fit.
    """
    # Under autocast the keys have a lower precision than the patches.
    keys = None if keys is None else keys.to(patches.dtype)
    return torch.ops.attnrx.native_merge.default(patches, sizes, keys, patches.shape[1] - count, lengths)


def _merge(
    patches: Tensor, sizes: Tensor, keys: Tensor | None, merged: int, lengths: bool
) -> tuple[Tensor, Tensor, Tensor]:
    library = required_library()
    compared = patches if keys is None else keys
    _require_fitting(patches, sizes, compared, merged, lengths and keys is not None)
    output, output_sizes, kept = _empty(patches, sizes, keys, merged, lengths)
    # A row must be contiguous; a copy is kept until the kernel has returned.
    patches = patches if patches.stride(2) == 1 else patches.contiguous()
    compared = compared if compared.stride(2) == 1 else compared.contiguous()
    sizes = sizes.contiguous()
    described = (
        patches.data_ptr(), *patches.stride()[:2], patches.shape[2],
        compared.data_ptr(), *compared.stride()[:2], compared.shape[2],
        patches.shape[0], patches.shape[1], merged, keys is None, lengths,
        sizes.data_ptr(), output.data_ptr(), output_sizes.data_ptr(), kept.data_ptr(),
    )  # fmt: skip
    if library.attnrx_merge((ctypes.c_int64 * len(described))(*described), torch.get_num_threads()):
        raise MemoryError("token merging found no memory for the patches of one image.")
    return output, output_sizes, kept


def _require_fitting(patches: Tensor, sizes: Tensor, compared: Tensor, merged: int, lengths_of_keys: bool) -> None:
    """Raises InvalidInput for arguments with which the kernel would read out of bounds."""
    count = patches.shape[1]
    if sizes.shape != patches.shape[:2] or compared.shape[:2] != patches.shape[:2]:
        found = f"{list(patches.shape)}, {list(sizes.shape)} and {list(compared.shape)}"
        raise InvalidInput(f"patches, sizes and compared rows of {found} are not those of the same patches.")
    if not 0 < merged <= (count + 1) // 2 or count < 2:
        raise InvalidInput(f"{merged} of {count} patches cannot be merged in one round; merge at most half of them.")
    if lengths_of_keys:
        raise InvalidInput("lengths are kept where patches are compared themselves; give no keys.")
    if not patches.dtype == sizes.dtype == compared.dtype == torch.float32:
        raise InvalidInput(f"the merging kernel reads float32; {patches.dtype}, {sizes.dtype}, {compared.dtype} given.")


def _empty(
    patches: Tensor, sizes: Tensor, keys: Tensor | None, merged: int, lengths: bool
) -> tuple[Tensor, Tensor, Tensor]:
    batch, count, width = patches.shape
    left = count - merged
    return (
        patches.new_empty(batch, left, width),
        sizes.new_empty(batch, left),
        sizes.new_empty(batch, left, dtype=torch.int64),
    )


_library.impl("native_merge", _merge, "CPU")
_library.impl("native_merge", _empty, "Meta")


@register_flop_formula(torch.ops.attnrx.native_merge)
def _operations(patches: torch.Size, sizes: torch.Size, keys: torch.Size | None, *_: object, **__: object) -> int:
    """Counts the products between the two sets as PyTorch does: two operations per MAC."""
    compared = patches if keys is None else keys
    return 2 * compared[0] * (compared[1] // 2) * ((compared[1] + 1) // 2) * compared[2]
