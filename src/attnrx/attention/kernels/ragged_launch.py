"""Launches the kernels of `ragged` on all heads of a batch."""

import importlib
from functools import lru_cache
from itertools import accumulate
from types import ModuleType

import torch

from attnrx.errors import NotSupported
from attnrx.shapes import Float, Tensor

ROWS, COLUMNS, STEP = 64, 64, 16


def ragged_attention(
    query: Float[Tensor, "batch tokens directions"],
    key: Float[Tensor, "batch tokens directions"],
    value: Float[Tensor, "batch tokens features"],
    ranks: tuple[int, ...],
    reads: tuple[int, ...],
    scale: float,
) -> tuple[Float[Tensor, "batch tokens features"], Float[Tensor, "batch heads tokens"]]:
    """Returns the outputs of all heads, concatenated, and the base-2 logarithm of the sum of every row's scores.

    Head h has `ranks[h]` features of queries and keys and `reads[h]` of the values. Only for inference: gradients are
    not recorded.

    Raises:
        NotSupported: Triton is not installed.
    """
    batch, tokens, _ = value.shape
    heads = len(ranks)
    query, key, value = _with_rows(query), _with_rows(key), _with_rows(value)
    output = value.new_empty(batch, tokens, sum(reads))
    log_sums = torch.empty(batch, heads, tokens, device=value.device, dtype=torch.float32)
    kernels().forward[(-(-tokens // ROWS), batch * heads)](
        query, key, value, output, log_sums, starts_of(ranks, value.device), starts_of(reads, value.device),
        tokens, heads, scale, *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], *output.stride()[:2],
        ROWS=ROWS, COLUMNS=COLUMNS, STEP=STEP, READS=max(_power_of_two(max(reads)), 16),
    )  # fmt: skip
    return output, log_sums


def map_statistics(
    query: Float[Tensor, "batch tokens directions"],
    key: Float[Tensor, "batch tokens directions"],
    log_sums: Float[Tensor, "batch heads tokens"],
    ranks: tuple[int, ...],
    scale: float,
    prefix: int,
) -> Float[Tensor, "batch heads patches 6"]:
    """Returns SPOT's six scalars per patch (Eqs. 3 to 8) without storing a map.

    The scores are recomputed by rows and by columns from the row sums of `ragged_attention`. The scalars are the
    attention of the class token to the patch and of the patch to the class token; mean and variance of the patch's
    attention to the patches, and of the attention it receives from them. The first `prefix` tokens are not patches.
    """
    batch, heads, tokens = log_sums.shape
    query, key, patches = _with_rows(query), _with_rows(key), tokens - prefix
    parts = []
    for kernel, block in ((kernels().row_statistics, ROWS), (kernels().column_statistics, COLUMNS)):
        found = torch.empty(batch, heads, tokens, 3, device=query.device, dtype=torch.float32)
        kernel[(-(-tokens // block), batch * heads)](
            query, key, log_sums, found, starts_of(ranks, query.device), tokens, heads, scale, prefix,
            *query.stride()[:2], *key.stride()[:2], ROWS=ROWS, COLUMNS=COLUMNS, STEP=STEP,
        )  # fmt: skip
        total, squares, class_token = found[:, :, prefix:].unbind(-1)
        mean = total / patches
        parts.append((class_token, mean, (squares / patches - mean.square()).clamp(min=0)))
    (pays, row_mean, row_spread), (gets, column_mean, column_spread) = parts
    return torch.stack((gets, pays, row_mean, row_spread, column_mean, column_spread), dim=-1)


@lru_cache(maxsize=1)
def kernels() -> ModuleType:
    """Imports the kernels, and Triton with them."""
    try:
        return importlib.import_module("attnrx.attention.kernels.ragged")
    except ImportError as error:
        raise NotSupported(f"ragged attention needs Triton ({error}): pip install triton.") from error


@lru_cache(maxsize=256)
def starts_of(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns the first feature of every head, and the end of the last one."""
    return torch.tensor((0, *accumulate(lengths)), dtype=torch.int32, device=device)


def _with_rows(side: Tensor) -> Tensor:
    """Returns the tensor with contiguous features; tokens may have any stride."""
    return side if side.stride(-1) == 1 and side.shape[-1] else side.contiguous()


def _power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()
