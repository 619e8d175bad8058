"""The attention layer: a score form, values, an output projection, and a backend that executes them."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from attnrx.attention.backends import Backend, Fused
from attnrx.attention.forms import FORMS, SvdaForm
from attnrx.attention.head_linear import HeadLinear
from attnrx.shapes import Float, Tensor
from attnrx.spec import AttentionSpec
from attnrx.spectrum import Spectrum


class Attention(nn.Module):
    """Multi-head attention of any form, with its own rank in every head.

    The heads lie in storage order (`spec.heads` names the original ones); values and output are full in every stored
    head.
    """

    def __init__(self, spec: AttentionSpec, backend: Backend | None = None):
        super().__init__()
        self.spec = spec
        self.scores = FORMS[spec.form](spec)
        self.value = HeadLinear(spec.width, (spec.head_dim,) * len(spec.heads))
        self.output = HeadLinear(len(spec.heads) * spec.head_dim, (spec.width,))
        self.backend: Backend = backend or Fused()

    def forward(self, tokens: Float[Tensor, "batch tokens width"]) -> Float[Tensor, "batch tokens width"]:
        """Mixes the tokens."""
        batch, length, _ = tokens.shape
        if not self.spec.heads:  # every head was removed: only the output bias is left
            return self.output(tokens.new_zeros(batch, length, 0))
        value = self.value(tokens).view(batch, length, len(self.spec.heads), self.spec.head_dim).transpose(1, 2)
        buckets = self.backend.buckets(self.spec)
        heads = self.backend(buckets, self.scores(tokens, buckets), value)
        return self.output(heads.transpose(1, 2).reshape(batch, length, -1))

    def spectrum(self) -> Spectrum:
        """Reads the score directions of the layer, one table per head, biases as the last column, in float64."""
        ranks, rows = self.spec.ranks, self.spec.rows
        most = max((*ranks, 1))
        used = torch.arange(most) < torch.tensor(ranks)[:, None] if ranks else torch.zeros(0, most, dtype=torch.bool)
        strength = torch.zeros(len(ranks), most, dtype=torch.float64)
        own = self.scores.strength if isinstance(self.scores, SvdaForm) else torch.ones(sum(ranks))
        strength[used] = own.detach().cpu().double()
        tables = [_table(side, rows, ranks, most) for side in (self.scores.query, self.scores.key)]
        return Spectrum(tables[0], tables[1], strength, used, self.spec.scale, self.spec.norms, self.spec.heads)


def _table(side: HeadLinear, rows: tuple[int, ...], ranks: tuple[int, ...], most: int) -> Tensor:
    augmented = torch.cat([side.weight, side.bias[:, None]], dim=1).detach().cpu().double()
    table = augmented.new_zeros(len(rows), most, augmented.shape[1])
    for head, (part, rank) in enumerate(zip(augmented.split(rows), ranks, strict=True)):
        table[head, :rank] = part[:rank]
    return table


@contextmanager
def using(layers: Iterable[Attention], backends: Iterable[Backend]) -> Iterator[None]:
    """Runs the layers on other backends for a while, one each, and puts theirs back afterwards."""
    layers = tuple(layers)
    before = [layer.backend for layer in layers]
    try:
        for layer, backend in zip(layers, backends, strict=True):
            layer.backend = backend
        yield
    finally:
        for layer, backend in zip(layers, before, strict=True):
            layer.backend = backend
