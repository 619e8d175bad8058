"""Launches the kernel of `ragged` on all heads of a batch."""

import importlib
from functools import lru_cache
from itertools import accumulate
from types import ModuleType

import torch

from attnrx.support.errors import NotSupported
from attnrx.support.shapes import Float, Tensor

# Queries and keys of a tile, and features per product: tl.dot takes 16 or more.
ROWS, COLUMNS, STEP = 64, 64, 16


def ragged_attention(
    query: Float[Tensor, "batch tokens directions"],
    key: Float[Tensor, "batch tokens directions"],
    value: Float[Tensor, "batch tokens features"],
    ranks: tuple[int, ...],
    value_dims: tuple[int, ...],
    scale: float,
) -> Float[Tensor, "batch tokens features"]:
    """Returns the outputs of all heads, concatenated.

    Head h has `ranks[h]` features of queries and keys and `value_dims[h]` of the values. Only for inference: gradients
    are not recorded.

    Raises:
        NotSupported: Triton is not installed.
    """
    batch, tokens, _ = value.shape
    heads = len(ranks)
    query, key, value = _with_rows(query), _with_rows(key), _with_rows(value)
    output = value.new_empty(batch, tokens, sum(value_dims))
    # Grid: tiles of queries x heads of all images. Triton takes ranges of a power of two only, and tl.dot 16 or more.
    kernels().forward[(-(-tokens // ROWS), batch * heads)](
        query, key, value, output, starts_of(ranks, value.device), starts_of(value_dims, value.device),
        tokens, heads, scale, *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], *output.stride()[:2],
        ROWS=ROWS, COLUMNS=COLUMNS, STEP=STEP, VALUE_DIM=max(_power_of_two(max(value_dims)), 16),
    )  # fmt: skip
    return output


@lru_cache(maxsize=1)
def kernels() -> ModuleType:
    """Imports the kernels, and Triton with them."""
    try:
        return importlib.import_module("attnrx.vit.kernels.ragged")
    except ImportError as error:
        raise NotSupported(f"ragged attention needs Triton ({error}): pip install triton.") from error


# Cached, because building it copies from the host to the device at every call.
@lru_cache(maxsize=256)
def starts_of(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns the first feature of every head, and the end of the last one."""
    return torch.tensor((0, *accumulate(lengths)), dtype=torch.int32, device=device)


def _with_rows(side: Tensor) -> Tensor:
    """Returns the tensor with contiguous features; tokens may have any stride."""
    return side if side.stride(-1) == 1 and side.shape[-1] else side.contiguous()


def _power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()
