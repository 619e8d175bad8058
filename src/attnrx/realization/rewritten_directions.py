"""Realizes a decision about rewritten directions: new rows of query and key, as combinations of the layer's rows."""

import torch

from attnrx.attention import Attention
from attnrx.attention.head_linear import HeadLinear
from attnrx.errors import NotSupported
from attnrx.prescription import Basis, ScoreDecision
from attnrx.shapes import Float, Tensor
from attnrx.spec import AttentionSpec


def mask_rewritten_(attention: Attention, layer: ScoreDecision, basis: Basis) -> None:
    """Writes the kept directions into the rows of their head, and zeros into the rest; keeps every shape."""
    spec = attention.spec
    if basis.shared:
        raise NotSupported(
            "directions that all heads share (CP SlimAtt) have no mask: the original layer has no rows for them. "
            "Realize the prescription by='compress'."
        )
    root = torch.where(layer.keep, layer.strength, 0.0).sqrt()[..., None]
    for side, table in ((attention.scores.query, basis.left), (attention.scores.key, basis.right)):
        rows = root * _combined(side, spec, table, shared=False)
        _write_(side, torch.cat([own[:rank] for own, rank in zip(rows, spec.rows, strict=True)]))


def copy_rewritten_(target: Attention, source: Attention, layer: ScoreDecision, basis: Basis, order: list[int]) -> None:
    """Writes the kept directions into a layer of matching shape; either side is scaled by the root of the strength."""
    shared = target.spec.form == "shared"
    kept = layer.keep[order].any(0) if order else layer.keep.any(0) & False
    for name, table in (("query", basis.left), ("key", basis.right)):
        rows = _combined(getattr(source.scores, name), source.spec, table, shared=basis.shared)
        _write_(getattr(target.scores, name), rows[0, kept] if shared else _kept_rows(rows, layer, order))
    if shared:
        fusion = torch.where(layer.keep, layer.strength, 0.0)[order][:, kept]
        target.scores.get_parameter("strength").copy_(fusion)


def _combined(
    side: HeadLinear, spec: AttentionSpec, table: Tensor, *, shared: bool
) -> Float[Tensor, "owners directions augmented"]:
    """Returns the new rows with their bias, in float64 on the CPU."""
    stored = side.augmented()
    most = table.shape[-1] // len(spec.rows) if shared else table.shape[-1]
    padded = stored.new_zeros(len(spec.rows), most, stored.shape[1])
    for own, rows in zip(padded, stored.split(spec.rows), strict=True):
        own[: rows.shape[0]] = rows
    return table @ (padded.flatten(0, 1) if shared else padded)


def _kept_rows(rows: Tensor, layer: ScoreDecision, order: list[int]) -> Float[Tensor, "rows augmented"]:
    parts = [layer.strength[head, layer.keep[head]].sqrt()[:, None] * rows[head, layer.keep[head]] for head in order]
    return torch.cat([rows.new_zeros(0, rows.shape[-1]), *parts])


def _write_(side: HeadLinear, augmented: Float[Tensor, "rows augmented"]) -> None:
    side.weight.copy_(augmented[:, :-1])
    if side.bias is not None:
        side.bias.copy_(augmented[:, -1])
