"""Realizes a decision about a layer's own directions: keeps or removes rows of its projections."""

import torch

from attnrx.attention import Attention
from attnrx.attention.head_linear import HeadLinear
from attnrx.prescription import ScoreDecision
from attnrx.shapes import Int, Tensor
from attnrx.spec import AttentionSpec


def mask_own_(attention: Attention, layer: ScoreDecision) -> None:
    """Writes zeros into the strengths or, for forms without strengths, into the query rows."""
    strength = torch.where(layer.keep & layer.heads[:, None], layer.strength, 0)
    attention.scores.set_strengths_([row[:rank] for row, rank in zip(strength, attention.spec.ranks, strict=True)])


def copy_own_(target: Attention, source: Attention, layer: ScoreDecision, order: list[int]) -> None:
    """Copies the kept rows into a layer of matching shape, its heads in this order."""
    spec, small = source.spec, target.spec
    keep_all = small.keeps_original_norms and not spec.keeps_original_norms
    if small.shares_directions:
        rows = torch.arange(sum(spec.rows))
    elif spec.shares_directions:  # a direction kept by two heads is stored twice
        rows = torch.cat([torch.nonzero(layer.keep[head]).flatten() for head in order])
    else:
        rows = _direction_rows(spec, layer, order, keep_all)
    _copy_rows_(target.scores.query, source.scores.query, rows)
    _copy_rows_(target.scores.key, source.scores.key, rows)
    keep = torch.ones_like(layer.keep) if small.shares_directions else layer.keep
    target.scores.set_strengths_([layer.strength[head, keep[head]] for head in order])


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
        needed = (keep_all or spec.keeps_original_norms) and bool(kept.any())
        rows.append(starts[head] + torch.cat([own[kept], own[~kept]] if needed else [own[kept]]))
    return torch.cat(rows)


def _copy_rows_(target: HeadLinear, source: HeadLinear, rows: Int[Tensor, "rows"]) -> None:
    target.weight.copy_(source.weight[rows])
    if target.bias is not None and source.bias is not None:
        target.bias.copy_(source.bias[rows])
