"""SVDA's attention, which computes scores from unit-length query and key rows and a learned strength per direction."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from attnrx.support.modules import of_weights
from attnrx.support.shapes import Float, Tensor
from attnrx.vit.attention.backends import Bucket, ScoreFactors
from attnrx.vit.attention.forms import Keys, Queries, ScoreForm, register_form
from attnrx.vit.attention.head_linear import padding_index
from attnrx.vit.spec import AttentionSpec, Compression, FormTraits
from attnrx_lab.strength_refit import refit_strengths


class SvdaForm(ScoreForm):
    """SVDA's attention scores (Eqs. 1-5): unit-length query and key rows, and a learned strength for every direction.

    With `norms="original"` each row is divided by its norm over all original directions. Then only the kept directions,
    which are stored first, are used for the scores. So the scores equal the scores of the masked model, but the
    projection still computes all directions.
    """

    def __init__(self, spec: AttentionSpec):
        super().__init__(spec)
        self.strength = nn.Parameter(torch.ones(sum(spec.ranks)))

    def rows_by_bucket(self, buckets: tuple[Bucket, ...]) -> list[int]:
        if not self.spec.keeps_original_norms:
            return super().rows_by_bucket(buckets)
        # The norm of a row needs all directions. A head of rank 0 has no scores, so it needs no norm.
        return [self.spec.original_rank if bucket.rank else 0 for bucket in buckets]

    def forward(self, query: Queries, key: Keys, buckets: tuple[Bucket, ...]) -> tuple[ScoreFactors, ...]:
        strength = of_weights(self, buckets, lambda: self._strength(buckets))
        return tuple(
            ScoreFactors(bucket, self._unit(q, bucket), self._unit(k, bucket), strength[bucket], self.spec.scale)
            for bucket, q, k in self.parts(query, key, buckets)
        )

    def strengths(self) -> Float[Tensor, "directions"]:
        return self.strength

    def set_strengths_(self, strengths: list[Float[Tensor, "_"]]) -> None:
        # The empty tensor is for a layer without heads, because cat refuses an empty list. Decisions are on the CPU.
        self.strength.copy_(torch.cat([torch.zeros(0), *strengths]))

    def _unit(self, rows: Tensor, bucket: Bucket) -> Tensor:
        if self.spec.keeps_original_norms:  # the removed directions follow the kept ones, and their strength is zero
            return unit_rows(rows)[..., : bucket.width]
        return unit_rows(rows, bucket.width)

    def _strength(self, buckets: tuple[Bucket, ...]) -> dict[Bucket, Float[Tensor, "heads width"]]:
        """Returns the strengths of every bucket of heads, padded with zeros to the width of the bucket."""
        padded, start = {}, 0
        for bucket in buckets:
            ranks = self.spec.ranks[bucket.heads]
            strength = self.strength[start : start + sum(ranks)]
            start += sum(ranks)
            if any(rank != bucket.width for rank in ranks):
                index = padding_index(ranks, (bucket.width,) * len(ranks), strength.device)
                strength = F.pad(strength, (0, 1)).index_select(0, index)
            padded[bucket] = strength.view(len(ranks), bucket.width)
        return padded


def unit_rows(rows: Float[Tensor, "*batch directions"], width: int | None = None) -> Float[Tensor, "*batch width"]:
    """Divides every row by its Euclidean norm (SVDA, Eq. 4), and pads it with zeros to `width` if `width` is given.

    A zero row stays zero. Its gradient is zero, instead of NaN or the reciprocal of an epsilon. Norms are summed in
    float32 or better, so float16 rows cannot overflow.
    """
    padding = 0 if width is None else width - rows.shape[-1]
    # `out=` below saves a copy, but does not support gradients. Tracing never uses `out=`, because torch.jit.trace
    # compares its graph with a graph that it traces without gradients.
    is_traced = torch.jit.is_tracing()
    if torch.is_grad_enabled() and not is_traced:
        unit = _UnitRows.apply(rows)
        assert isinstance(unit, Tensor)
        return F.pad(unit, (0, padding)) if padding else unit
    inverse = inverse_norms(rows).to(rows.dtype)
    if not padding or is_traced:
        return F.pad(rows * inverse, (0, padding)) if padding else rows * inverse
    # The products are written into the padded buffer, because padding them afterwards would copy them again.
    padded = rows.new_empty(*rows.shape[:-1], rows.shape[-1] + padding)
    padded[..., rows.shape[-1] :] = 0
    torch.mul(rows, inverse, out=padded[..., : rows.shape[-1]])
    return padded


def inverse_norms(rows: Float[Tensor, "*batch directions"]) -> Float[Tensor, "*batch 1"]:
    """Returns the reciprocal of every row's Euclidean norm, in float32 or better, or zero for a zero row."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    norms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=wide)
    # Below the smallest normal number the reciprocal overflows, so such a row is treated as zero.
    return torch.where(norms > torch.finfo(wide).tiny, norms.reciprocal(), torch.zeros_like(norms))


class _UnitRows(torch.autograd.Function):
    # The backward pass is written by hand, because autograd's graph for x / |x| passes over memory about twice as
    # often. In eager mode these passes make an SVDA layer slower than fused dense attention.
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        inverse = inverse_norms(rows)
        ctx.save_for_backward(rows, inverse)
        # In half precision, rounding the inverse scales a whole row. In bfloat16 the factor is at most 1 + 2^-9.
        return rows * inverse.to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gradient,) = gradients
        rows, inverse = ctx.saved_tensors
        along = (gradient * rows).sum(-1, keepdim=True, dtype=inverse.dtype)
        # d(x / |x|) = (g - x (x . g) / |x|^2) / |x|. The factor of x is computed in float32 or better.
        tangent = torch.addcmul(gradient, rows, (along * inverse.square()).to(rows.dtype), value=-1)
        return tangent.mul_(inverse.to(rows.dtype))


register_form(
    "svda",
    SvdaForm,
    FormTraits(has_strengths=True, shares_directions=False, norms=("kept", "original")),
    {
        # The paper's compression deletes rows of the weights, and the norm is over the remaining directions.
        "renormalized": Compression(keeps_norms=False),
        "refit": Compression(keeps_norms=False, fit=refit_strengths),
    },
)
