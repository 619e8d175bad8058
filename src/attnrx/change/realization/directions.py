"""Realizes decisions about query-key directions: shapes, the model's own rows, and rewritten rows."""

from dataclasses import replace

import torch

from attnrx.nouns.prescription import Basis, LayerPrescription, OutputDecision, ScoreDecision
from attnrx.support.errors import InvalidInput, NotSupported
from attnrx.support.shapes import Bool, Float, Int, Tensor
from attnrx.vit.attention import Attention
from attnrx.vit.attention.forms import row_pairs
from attnrx.vit.attention.head_linear import HeadLinear
from attnrx.vit.maps import REALIZED_NORMS
from attnrx.vit.spec import BIASES, AttentionSpec


def head_order(layer: LayerPrescription) -> list[int]:
    """Returns the kept heads in the order in which the compressed layer stores them: by descending rank."""
    # Heads of equal rank become neighbours, which a backend computes as one bucket.
    heads, ranks = torch.nonzero(layer.heads).flatten().tolist(), layer.qk.ranks
    return sorted(heads, key=lambda head: -ranks[head])


def compressed_spec(spec: AttentionSpec, layer: LayerPrescription, norms: str = REALIZED_NORMS[0]) -> AttentionSpec:
    """Returns the spec of the compressed layer.

    Rewritten directions need no key bias, which the softmax cancels. Rewritten values need no bias either: the bias of
    the output projection absorbs it.

    Raises:
        NotSupported: The exact norms are requested of a layer that was compressed before.
    """
    order = head_order(layer)
    heads = tuple(spec.heads[head] for head in order)
    # Ranks and value ranks refer to the heads of `spec`; the names of the heads are those of the original model.
    small = _with_values(_with_directions(spec, layer.qk, order, norms), layer.outputs.get("vo"), order)
    return replace(small, heads=heads)


def _with_directions(spec: AttentionSpec, layer: ScoreDecision, order: list[int], norms: str) -> AttentionSpec:
    heads = tuple(spec.heads[head] for head in order)
    if layer.basis is not None and layer.basis.shared:
        kept, blocks = _kept_shared(layer, order), layer.basis.blocks
        if blocks is not None:
            blocks = tuple(int(part.sum()) for part in kept.split(blocks))  # a block may lose all of its directions
        shared = spec.with_shared_directions(int(kept.sum()), blocks)
        return _without(shared.with_ranks(shared.ranks[: len(order)], heads, "none"), "key")
    ranks = tuple(layer.ranks[head] for head in order)
    # No longer shared: each head stores its own rows.
    if spec.shares_directions and not (order and bool(layer.keep[order].all())):
        return replace(spec, form="dense", ranks=spec.ranks, blocks=None).with_ranks(ranks, heads, "none")
    if spec.rotates:
        # The bias of a rotated key depends on the position, so the softmax does not cancel it.
        return spec.with_ranks(ranks, heads, spec.norms, kept_pairs(spec, layer, order))
    if layer.basis is not None:
        return _without(spec.with_ranks(ranks, heads, spec.norms), "key")
    # Without a head that loses some of its directions the norms are the same, and no row is stored for them only.
    loses = any(0 < layer.ranks[head] < spec.ranks[head] for head in order)
    if norms != "exact" or not spec.has_norms or spec.keeps_original_norms or not loses:
        return spec.with_ranks(ranks, heads, spec.norms)
    if any(rank < spec.original_rank for rank in spec.ranks):
        raise NotSupported(
            f"norms='exact' needs the norms of all {spec.original_rank} original directions, but this layer was "
            f"compressed to ranks {spec.ranks} before; realize the prescription from the original model, "
            "or use 'renormalized'."
        )
    return spec.with_ranks(ranks, heads, "original")


def kept_pairs(spec: AttentionSpec, layer: ScoreDecision, order: list[int]) -> tuple[tuple[int, ...], ...]:
    """Returns the frequencies of the kept pairs of these heads; their real parts precede the imaginary ones.

    Raises:
        InvalidInput: A decision of another form, or one that keeps one row of a pair only.
    """
    table = None if layer.basis is None else layer.basis.pairs
    if table is None and layer.basis is not None:
        raise InvalidInput("directions of a rotary layer need the frequencies of their pairs; prescribe again.")
    # [heads, directions] frequencies, -1 for rows that are not rotated.
    rows = row_pairs(spec) if table is None else table
    chosen = [rows[head, : layer.keep.shape[1]][layer.keep[head, : rows.shape[1]]] for head in order]
    pairs = [row[row >= 0].tolist() for row in chosen]
    if any(frequencies[: len(frequencies) // 2] != frequencies[len(frequencies) // 2 :] for frequencies in pairs):
        raise InvalidInput("a decision keeps one row of a rotated pair: keep or remove both of them.")
    return tuple(tuple(frequencies[: len(frequencies) // 2]) for frequencies in pairs)


def _with_values(spec: AttentionSpec, values: OutputDecision | None, order: list[int]) -> AttentionSpec:
    if values is None:
        return spec
    value_ranks = tuple(values.ranks[head] for head in order)
    # In the order of BIASES, so that equal layers compare equal.
    present = (*spec.biases, "output")
    biases = tuple(name for name in BIASES if name in present and name != "value")
    return replace(spec, value_ranks=value_ranks, biases=biases)


def _without(spec: AttentionSpec, bias: str) -> AttentionSpec:
    return replace(spec, biases=tuple(name for name in spec.biases if name != bias))


def mask_rows_(attention: Attention, layer: ScoreDecision) -> None:
    """Writes zeros into the strengths or, for forms without strengths, into the query rows."""
    strength = torch.where(layer.keep, layer.strength, 0)
    attention.scores.set_strengths_([row[:rank] for row, rank in zip(strength, attention.spec.ranks, strict=True)])


def copy_kept_rows_(target: Attention, source: Attention, layer: ScoreDecision, order: list[int]) -> None:
    """Copies the kept rows into a layer of matching shape, its heads in this order."""
    spec, small = source.spec, target.spec
    # The removed rows are stored, too, where the small layer divides by the norms over all of them.
    keep_all = small.keeps_original_norms and not spec.keeps_original_norms
    if small.shares_directions:
        rows = torch.arange(sum(small.rows))
    elif spec.shares_directions:  # a direction kept by two heads is stored twice
        rows = torch.nonzero(layer.keep[order])[:, 1]
    else:
        rows = _direction_rows(spec, layer, order, keep_all)
    copy_rows_(target.scores.query, source.scores.query, rows)
    copy_rows_(target.scores.key, source.scores.key, rows)
    keep = torch.ones_like(layer.keep) if small.shares_directions else layer.keep
    target.scores.set_strengths_([layer.strength[head, keep[head]] for head in order])


def _direction_rows(spec: AttentionSpec, layer: ScoreDecision, order: list[int], keep_all: bool) -> Int[Tensor, "rows"]:
    """Returns the stored rows of query and key, kept directions first; with `keep_all` the others follow, for the
    norms.
    """
    starts = torch.tensor([0, *spec.rows]).cumsum(0)
    rows = [torch.zeros(0, dtype=torch.long)]
    for head in order:
        indices = torch.arange(spec.rows[head])
        kept = torch.zeros(spec.rows[head], dtype=torch.bool)
        kept[: spec.ranks[head]] = layer.keep[head, : spec.ranks[head]]
        # A head without directions attends uniformly, and needs no norm.
        needed = (keep_all or spec.keeps_original_norms) and bool(kept.any())
        rows.append(starts[head] + torch.cat([indices[kept], indices[~kept]] if needed else [indices[kept]]))
    return torch.cat(rows)


def copy_rows_(target: HeadLinear, source: HeadLinear, rows: Int[Tensor, "rows"]) -> None:
    target.weight.copy_(source.weight[rows])
    if target.bias is not None and source.bias is not None:
        target.bias.copy_(source.bias[rows])


def mask_rewritten_rows_(attention: Attention, layer: ScoreDecision, basis: Basis) -> None:
    """Writes the kept directions into the rows of their head, and zeros into the rest; keeps every shape.

    Raises:
        NotSupported: The directions are shared by all heads.
    """
    spec = attention.spec
    if basis.pairs is not None:
        _mask_rotary_(attention, layer, basis)
        return
    if basis.shared:
        raise NotSupported(
            "directions that all heads share (CP SlimAtt) have no mask: the original layer has no rows for them. "
            "Realize the prescription by='compress'."
        )
    # [heads, directions, 1]. A form without strengths has them in its rows: their root on either side.
    root = torch.where(layer.keep, layer.strength, 0.0).sqrt()[..., None]
    for side, table in ((attention.scores.query, basis.left), (attention.scores.key, basis.right)):
        rows = root * _combined(side, spec, table, shared=False)
        _write_(side, torch.cat([head_rows[:rank] for head_rows, rank in zip(rows, spec.rows, strict=True)]))


def _mask_rotary_(attention: Attention, layer: ScoreDecision, basis: Basis) -> None:
    """Writes the kept directions into the rows of their head: those that are not rotated, zeros, then the pairs."""
    spec, heads = attention.spec, list(range(len(attention.spec.heads)))
    pairs = kept_pairs(spec, layer, heads)
    for side, table in ((attention.scores.query, basis.left), (attention.scores.key, basis.right)):
        # Pairs are the last rows of a head (`row_pairs`), at any rank: the zeros are between them and the other rows.
        rows, parts = _combined(side, spec, table, shared=False), []
        for head, rank, frequencies in zip(heads, spec.ranks, pairs, strict=True):
            kept = _kept_rows(rows, layer, [head])
            still = len(kept) - 2 * len(frequencies)
            parts += [kept[:still], kept.new_zeros(rank - len(kept), kept.shape[1]), kept[still:]]
        _write_(side, torch.cat(parts))
    attention.spec = attention.scores.spec = replace(spec, pairs=pairs)


def write_rewritten_rows_(
    target: Attention, source: Attention, layer: ScoreDecision, basis: Basis, order: list[int]
) -> None:
    """Writes the kept directions into a layer of matching shape; either side is scaled by the root of the strength."""
    kept = _kept_shared(layer, order)
    for name, table in (("query", basis.left), ("key", basis.right)):
        rows = _combined(getattr(source.scores, name), source.spec, table, shared=basis.shared)
        _write_(getattr(target.scores, name), rows[0, kept] if basis.shared else _kept_rows(rows, layer, order))
    if basis.shared:
        # A direction that some head keeps is stored once; the strength of the other heads is zero there.
        target.scores.set_strengths_(list(torch.where(layer.keep, layer.strength, 0.0)[order][:, kept]))


def _kept_shared(layer: ScoreDecision, order: list[int]) -> Bool[Tensor, "directions"]:
    """Returns the directions that any of these heads keeps."""
    return layer.keep[order].any(0) if order else torch.zeros_like(layer.keep[0])


def _combined(
    side: HeadLinear, spec: AttentionSpec, table: Tensor, *, shared: bool
) -> Float[Tensor, "owners directions augmented"]:
    """Returns the new rows with their bias, in float64 on the CPU."""
    # In float64, because a basis may be ill-conditioned, and with the bias, which is combined like every other column.
    stored, owners = side.augmented(), (sum(spec.rows),) if spec.shares_directions else spec.rows
    num_rows = table.shape[-1] // len(owners) if shared else table.shape[-1]
    padded = stored.new_zeros(len(owners), num_rows, stored.shape[1])
    for owner_rows, rows in zip(padded, stored.split(owners), strict=True):
        owner_rows[: rows.shape[0]] = rows  # a view of `padded`
    return table @ (padded.flatten(0, 1) if shared else padded)


def _kept_rows(rows: Tensor, layer: ScoreDecision, order: list[int]) -> Float[Tensor, "rows augmented"]:
    parts = [layer.strength[head, layer.keep[head]].sqrt()[:, None] * rows[head, layer.keep[head]] for head in order]
    return torch.cat([rows.new_zeros(0, rows.shape[-1]), *parts])  # also for no head at all


def _write_(side: HeadLinear, augmented: Float[Tensor, "rows augmented"]) -> None:
    side.weight.copy_(augmented[:, :-1])
    if side.bias is not None:
        side.bias.copy_(augmented[:, -1])
