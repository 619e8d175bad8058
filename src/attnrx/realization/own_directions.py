"""Realizes a decision about a layer's own directions: keeps or removes rows of its projections."""

import torch

from attnrx.attention import Attention
from attnrx.attention.forms import DenseForm
from attnrx.attention.head_linear import HeadLinear
from attnrx.prescription import ScoreDecision
from attnrx.shapes import Float, Int, Tensor
from attnrx.spec import AttentionSpec


def mask_own_(attention: Attention, layer: ScoreDecision) -> None:
    """Writes zeros into the strengths or, for forms without strengths, into the query rows."""
    spec = attention.spec
    strength = torch.where(layer.keep & layer.heads[:, None], layer.strength, 0)
    if isinstance(attention.scores, DenseForm):
        _scale_rows_(attention.scores.query, _flat(strength, spec))
    else:
        own = attention.scores.get_parameter("strength")
        own.copy_(strength if own.ndim > 1 else _flat(strength, spec))


def copy_own_(target: Attention, source: Attention, layer: ScoreDecision, order: list[int]) -> None:
    """Copies the kept rows into a layer of matching shape, its heads in this order."""
    spec, small = source.spec, target.spec
    keep_all = small.norms == "original" and spec.norms != "original"
    if small.form == "shared":
        rows = torch.arange(sum(spec.rows))
    elif spec.form == "shared":  # a direction kept by two heads is stored twice
        rows = torch.cat([torch.nonzero(layer.keep[head]).flatten() for head in order])
    else:
        rows = _direction_rows(spec, layer, order, keep_all)
    _copy_rows_(target.scores.query, source.scores.query, rows)
    _copy_rows_(target.scores.key, source.scores.key, rows)
    _write_strengths_(target, layer, order)


def value_features(spec: AttentionSpec, order: list[int]) -> Int[Tensor, "features"]:
    """Returns the indices of the value features of these heads, in this order."""
    features = torch.arange(sum(spec.reads)).split(spec.reads)
    return torch.cat([torch.zeros(0, dtype=torch.long), *(features[head] for head in order)])


def copy_values_(target: Attention, source: Attention, order: list[int]) -> None:
    """Copies the values and output columns of the kept heads into a layer of matching shape."""
    features = value_features(source.spec, order)
    _copy_rows_(target.value, source.value, features)
    target.output.weight.copy_(source.output.weight[:, features])
    if target.output.bias is not None and source.output.bias is not None:
        target.output.bias.copy_(source.output.bias)


def _write_strengths_(result: Attention, layer: ScoreDecision, order: list[int]) -> None:
    if isinstance(result.scores, DenseForm):
        kept = [layer.strength[head, layer.keep[head]] for head in order]
        _scale_rows_(result.scores.query, torch.cat([layer.strength.new_zeros(0), *kept]))
        return
    own = result.scores.get_parameter("strength")
    if own.ndim > 1:
        own.copy_(layer.strength[order])
    else:
        kept = [layer.strength[head, layer.keep[head]] for head in order]
        own.copy_(torch.cat([layer.strength.new_zeros(0), *kept]))


def _flat(strength: Float[Tensor, "heads directions"], spec: AttentionSpec) -> Float[Tensor, "rows"]:
    return torch.cat([row[:rank] for row, rank in zip(strength, spec.ranks, strict=True)])


def _direction_rows(spec: AttentionSpec, layer: ScoreDecision, order: list[int], keep_all: bool) -> Int[Tensor, "rows"]:
    """Returns the stored rows of query and key, kept directions first; with `keep_all` the others follow, for the
    norms.
    """
    starts = torch.tensor([0, *spec.rows]).cumsum(0)
    rows = [torch.zeros(0, dtype=torch.long)]
    for head in order:
        own = torch.arange(spec.rows[head])
        kept = torch.zeros(spec.rows[head], dtype=torch.bool)
        kept[: spec.ranks[head]] = layer.keep[head, : spec.ranks[head]]
        needed = (keep_all or spec.norms == "original") and bool(kept.any())
        rows.append(starts[head] + torch.cat([own[kept], own[~kept]] if needed else [own[kept]]))
    return torch.cat(rows)


def _copy_rows_(target: HeadLinear, source: HeadLinear, rows: Int[Tensor, "rows"]) -> None:
    target.weight.copy_(source.weight[rows])
    if target.bias is not None and source.bias is not None:
        target.bias.copy_(source.bias[rows])


def _scale_rows_(linear: HeadLinear, factors: Float[Tensor, "rows"]) -> None:
    if not torch.equal(factors, torch.ones_like(factors)):
        linear.weight.mul_(factors.to(linear.weight.dtype)[:, None])
        if linear.bias is not None:
            linear.bias.mul_(factors.to(linear.bias.dtype))
