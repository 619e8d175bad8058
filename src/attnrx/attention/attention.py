"""The attention layer: a score form, values, an output projection, and a backend that executes them."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from attnrx.attention.backends.auto import Auto
from attnrx.attention.backends.backend import Backend
from attnrx.attention.factors import AttentionContext, Bucket, ScoreFactors
from attnrx.attention.forms import FORMS
from attnrx.attention.head_linear import FusedQKV, HeadLinear, OutputProjection, in_buckets
from attnrx.shapes import Float, Tensor, TokenBatch
from attnrx.spec import AttentionSpec
from attnrx.spectrum import Spectrum

MOST_PLANS = 64
"""Cached plans per layer. A full cache is cleared, e.g. after images of many sizes."""


@dataclass(frozen=True)
class LayerPlan:
    """The computation of one layer in one context: the backend, the buckets and the padded row counts.

    `reads` are the padded value dimensions per head, `widths` those per bucket. `joint`: whether
    `Backend.of_joint` computes it.
    """

    backend: Backend
    buckets: tuple[Bucket, ...]
    reads: tuple[int, ...]
    rows: tuple[int, ...]
    widths: tuple[int, ...]
    joint: bool


class Attention(nn.Module):
    """Multi-head attention of any form, with its own rank and value dimension in every head.

    Heads are in storage order; `spec.heads` are their indices in the original model.
    """

    def __init__(self, spec: AttentionSpec, backend: Backend | None = None):
        super().__init__()
        self.spec = spec
        self.scores = FORMS[spec.form](spec)
        self.value = HeadLinear(spec.width, spec.reads, spec.has_bias("value"))
        self.output = OutputProjection(spec.reads, spec.width, spec.has_bias("output"))
        self.backend: Backend = backend or Auto()
        self._fused_qkv = FusedQKV()
        self._plans_of: Backend | None = None
        self._plans: dict[AttentionContext, LayerPlan] = {}

    def forward(self, tokens: TokenBatch, key_tokens: Float[Tensor, "batch keys width"] | None = None) -> TokenBatch:
        """Returns the attention output of `tokens`.

        Keys and values are computed from `key_tokens` if given, otherwise from `tokens`.
        """
        if not self.spec.heads:  # every head was removed: only the output bias is left
            return self.output(tokens[..., :0])
        plan, scores = self.plan(tokens if key_tokens is None else key_tokens), self.scores
        sides = ((scores.query, plan.rows), (scores.key, plan.rows), (self.value, plan.reads))
        if key_tokens is None:
            joint = self._fused_qkv.product(tokens, sides)
            # Under autocast the product has a lower precision than the tokens.
            if plan.joint and joint is not None and joint.dtype == tokens.dtype:
                read = plan.backend.of_joint(joint, plan.rows, plan.reads, self.spec.scale)
                return self.output.padded(read, plan.reads)
            query, key, value = self._fused_qkv.split(joint, tokens, sides)
        else:
            query, (key, value) = scores.query.padded(tokens, plan.rows), self._fused_qkv(key_tokens, sides[1:])
        values = [part.transpose(1, 2) for part in in_buckets(value, plan.widths, plan.buckets)]
        read = plan.backend(plan.buckets, scores(query, key, plan.buckets), values)
        return self.output.padded(read, plan.reads)

    def plan(self, tokens: TokenBatch) -> LayerPlan:
        """Returns how the backend computes these tokens; cached by shape."""
        context = AttentionContext.of(tokens)
        if not context.free:
            return self._planned(context)
        if self._plans_of is not self.backend or len(self._plans) > MOST_PLANS:
            self._plans_of, self._plans = self.backend, {}
        if context not in self._plans:
            self._plans[context] = self._planned(context)
        return self._plans[context]

    def _planned(self, context: AttentionContext) -> LayerPlan:
        backend = self.backend.at(self.spec, context)
        buckets, reads = backend.layout(self.spec, context)
        widths = tuple([reads[bucket.start] for bucket in buckets])
        joint = backend.takes_joint(self.spec, context)
        return LayerPlan(backend, buckets, reads, self.scores.rows(buckets), widths, joint)

    def factors(self, tokens: TokenBatch, buckets: tuple[Bucket, ...]) -> tuple[ScoreFactors, ...]:
        """Returns the factors of the scores of every bucket that has directions."""
        rows = self.scores.rows(buckets)
        return self.scores(self.scores.query.padded(tokens, rows), self.scores.key.padded(tokens, rows), buckets)

    def spectrum(self) -> Spectrum:
        """Returns the score directions, one table per owner with the biases as last column, in float64."""
        spec = self.spec
        ranks, most = spec.ranks, max((*spec.ranks, 1))
        used = torch.arange(most) < torch.tensor(ranks)[:, None] if ranks else torch.zeros(0, most, dtype=torch.bool)
        strength = torch.zeros(len(ranks), most, dtype=torch.float64)
        strength[used] = self.scores.strengths().detach().cpu().double().flatten()
        shared = spec.shares_directions
        # Shared directions have one table, also where they are in blocks.
        rows = (sum(spec.rows),) if shared else spec.rows
        owners = rows if shared else ranks
        tables = [_table(side, rows, owners, most) for side in (self.scores.query, self.scores.key)]
        return Spectrum(tables[0], tables[1], strength, used, spec.scale, spec.norms, spec.heads, shared=shared)

    def value_factors(self) -> dict[str, Tensor]:
        """Returns the factors of the plain SVD of every head's values, in float64.

        value_factor and readout_factor [heads, _, reads] are R of V = Q R, where V are the transposed value rows of a
        head or its columns of the output projection, padded with zeros; value_bias is [heads, reads].
        """
        reads, most = self.spec.reads, max((*self.spec.reads, 1))
        rows = _table(self.value, reads, reads, most)
        columns = torch.zeros(len(reads), most, self.spec.width, dtype=torch.float64)
        for own, part in zip(columns, self.output.weight.detach().cpu().double().split(reads, dim=1), strict=True):
            own[: part.shape[1]] = part.mT
        factors = [torch.linalg.qr(side.mT, mode="r").R for side in (rows[..., :-1], columns)]
        return {"value_factor": factors[0], "readout_factor": factors[1], "value_bias": rows[..., -1].clone()}


def _table(side: HeadLinear, rows: tuple[int, ...], ranks: tuple[int, ...], most: int) -> Tensor:
    augmented = side.augmented()
    table = augmented.new_zeros(len(rows), most, augmented.shape[1])
    for head, (part, rank) in enumerate(zip(augmented.split(rows), ranks, strict=True)):
        table[head, :rank] = part[:rank]
    return table


@contextmanager
def using(layers: Iterable[Attention], backends: Iterable[Backend]) -> Iterator[None]:
    """Runs the layers on other backends inside the context, one each, and restores theirs afterwards."""
    layers = tuple(layers)
    before = [layer.backend for layer in layers]
    try:
        for layer, backend in zip(layers, backends, strict=True):
            layer.backend = backend
        yield
    finally:
        for layer, backend in zip(layers, before, strict=True):
            layer.backend = backend
