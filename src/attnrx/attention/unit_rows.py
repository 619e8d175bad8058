"""Row normalization with a hand-written backward pass: few passes over memory, and safe at zero.

Autograd's own graph for x / |x| makes about twice as many passes, which is the overhead of an SVDA layer over fused
dense attention in eager mode.
"""

from typing import Any

import torch
import torch.nn.functional as F

from attnrx.shapes import Float, Tensor


def unit_rows(rows: Float[Tensor, "*batch directions"], width: int | None = None) -> Float[Tensor, "*batch width"]:
    """Divides every row by its Euclidean norm (Eq. 4); with a `width`, zeros follow up to it.

    A zero row stays zero and has zero gradient, instead of NaN or the reciprocal of an epsilon. Norms are summed in
    float32 or better, so float16 rows cannot overflow.
    """
    missing = 0 if width is None else width - rows.shape[-1]
    if torch.is_grad_enabled():
        unit = _UnitRows.apply(rows)
        assert isinstance(unit, Tensor)
        return F.pad(unit, (0, missing)) if missing else unit
    inverse = inverse_norms(rows).to(rows.dtype)
    if not missing:
        return rows * inverse
    # The products are written into the padded buffer: padding them afterwards would be one more copy.
    padded = rows.new_empty(*rows.shape[:-1], rows.shape[-1] + missing)
    padded[..., rows.shape[-1] :] = 0
    torch.mul(rows, inverse, out=padded[..., : rows.shape[-1]])
    return padded


def inverse_norms(rows: Float[Tensor, "*batch directions"]) -> Float[Tensor, "*batch 1"]:
    """Returns one over the Euclidean norm of every row, in float32 or better; zero for a zero row."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    norms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=wide)
    # Below the smallest normal number the reciprocal overflows: such a row is treated as zero.
    return torch.where(norms > torch.finfo(wide).tiny, norms.reciprocal(), torch.zeros_like(norms))


class _UnitRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        inverse = inverse_norms(rows)
        ctx.save_for_backward(rows, inverse)
        # In half precision the product is rounded like every other one: a factor of at most 1 + 2^-9 a row in bfloat16.
        return rows * inverse.to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gradient,) = gradients
        rows, inverse = ctx.saved_tensors
        along = (gradient * rows).sum(-1, keepdim=True, dtype=inverse.dtype)
        # d(x / |x|) = (g - x (x . g) / |x|^2) / |x|; the factor of x is formed in float32.
        tangent = torch.addcmul(gradient, rows, (along * inverse.square()).to(rows.dtype), value=-1)
        return tangent.mul_(inverse.to(rows.dtype))
