"""Realizes the decisions about the attention of one layer: its smaller or masked module, scores first, then values.

A layer stores its kept heads by descending rank (`head_order`); decisions have them in the order of the original. Rows
of query and key are the directions of a head, and are copied (the model's own) or combined from those of the layer (a
basis). Values and output projection are copied, or reduced to the kept dimensions.
"""

import copy
from collections.abc import Sequence
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

NO_INDICES = torch.zeros(0, dtype=torch.long)  # before a concatenation, for layers without any head


def compressed_attention(attention: Attention, layer: LayerPrescription, norms: str) -> Attention:
    """Returns the smaller attention of a layer; its heads are stored by descending rank.

    Raises:
        NotSupported: norms="exact" of a layer that lost directions before.
        InvalidInput: A decision that does not fit the form of the attention.
    """
    order, values, weight = head_order(layer), layer.outputs.get("vo"), attention.value.weight
    small = compressed_spec(attention.spec, layer, norms)
    result = Attention(small, attention.backend).to(weight.device, weight.dtype)
    if layer.qk.basis is None:
        _copy_directions_(result, attention, layer.qk, order)
    else:
        _combine_directions_(result, attention, layer.qk, layer.qk.basis, order)
    if values is None:
        features = _in_order(attention.spec.value_dims, order)
        _copy_rows_(result.value, attention.value, features)
        result.output.weight.copy_(attention.output.weight[:, features])
        if result.output.bias is not None and attention.output.bias is not None:
            result.output.bias.copy_(attention.output.bias)
    else:
        value, output, bias = _reduced_values(attention, values)
        features = _in_order(values.ranks, order)
        _write_values_(result, value[features], output[:, features], bias)
    # Modules of the library, with weights of their own; a spec has their names only.
    result.inner_norms.update(copy.deepcopy(dict(attention.inner_norms.items())))
    result.kept_patches = attention.kept_patches
    return result.train(attention.training)


def mask_attention_(attention: Attention, layer: LayerPrescription) -> None:
    """Writes zeros in place of what a layer loses, and keeps every shape.

    Raises:
        NotSupported: Directions that all heads share, for which the layer has no rows.
        InvalidInput: A decision that does not fit the form of the attention, or reduced values without a bias of the
            output projection.
    """
    spec, values = attention.spec, layer.outputs.get("vo")
    if values is not None:
        compressed_spec(spec, layer)  # raises for decisions that cannot be realized
        _mask_values_(attention, values)
    if layer.qk.basis is None:
        # Zeros in the strengths or, for forms without strengths, in the query rows.
        strength = torch.where(layer.qk.keep, layer.qk.strength, 0)
        attention.scores.set_strengths_([row[:rank] for row, rank in zip(strength, spec.ranks, strict=True)])
    else:
        _mask_combined_directions_(attention, layer.qk, layer.qk.basis)
    # [sum of value dimensions]: the columns of removed heads in the output projection.
    removed = (~layer.heads).repeat_interleave(torch.tensor(spec.value_dims, dtype=torch.long))
    attention.output.weight[:, removed] = 0
    # The values of a removed head do not affect the output; zeros give them norm 0, for reducers that use value norms.
    attention.value.weight[removed] = 0
    if attention.value.bias is not None:
        attention.value.bias[removed] = 0


# Shapes ---------------------------------------------------------------------------------------------------------------


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
        NotSupported: norms="exact" of a layer that lost directions before.
        InvalidInput: A decision that does not fit the form of the attention.
    """
    scores, values, order = layer.qk, layer.outputs.get("vo"), head_order(layer)
    ranks, biases = tuple(scores.ranks[head] for head in order), set(spec.biases)
    large, pairs, kept_norms = spec, None, spec.norms
    if scores.basis is not None and scores.basis.shared:
        kept, blocks = _kept_by_any(scores, order), scores.basis.blocks
        if blocks is not None:
            blocks = tuple(int(part.sum()) for part in kept.split(blocks))  # a block may lose all of its directions
        large, kept_norms = spec.with_shared_directions(int(kept.sum()), blocks), "none"
        ranks = large.ranks[: len(order)]
        biases.discard("key")
    elif spec.traits.shares_directions and not (order and bool(scores.keep[order].all())):
        # No longer shared: each head stores its own rows.
        large, kept_norms = replace(spec, form="dense", blocks=None), "none"
    elif spec.traits.rotates:
        # The bias of a rotated key depends on the position, so the softmax does not cancel it.
        pairs = _kept_pairs(spec, scores, order)
    elif scores.basis is not None:
        biases.discard("key")
    elif norms == "exact" and _needs_original_norms(spec, scores, order):
        kept_norms = "original"
    # The names of the heads are those of the original model, ranks and value ranks refer to the heads of `spec`.
    small = large.with_ranks(ranks, tuple(spec.heads[head] for head in order), kept_norms, pairs)
    if values is not None:
        biases = (biases | {"output"}) - {"value"}
        small = replace(small, value_ranks=tuple(values.ranks[head] for head in order))
    # In the order of BIASES, so that equal layers compare equal.
    return replace(small, biases=tuple(name for name in BIASES if name in biases))


def _needs_original_norms(spec: AttentionSpec, scores: ScoreDecision, order: Sequence[int]) -> bool:
    """Whether the rows that are removed are still needed for the norms; raises NotSupported if they are gone."""
    # Without a head that loses some of its directions the norms are the same, and no row is stored for them only.
    loses = any(0 < scores.ranks[head] < spec.ranks[head] for head in order)
    if not spec.has_norms or spec.keeps_original_norms or not loses:
        return False
    if any(rank < spec.original_rank for rank in spec.ranks):
        raise NotSupported(
            f"norms='exact' needs the norms of all {spec.original_rank} original directions, but this layer was "
            f"compressed to ranks {spec.ranks} before; realize the prescription from the original model, "
            "or use 'renormalized'."
        )
    return True


def _kept_pairs(spec: AttentionSpec, scores: ScoreDecision, order: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Returns the frequencies of the kept pairs of these heads; their real parts precede the imaginary ones.

    Raises:
        InvalidInput: A decision of another form, or one that keeps one row of a pair only.
    """
    table = None if scores.basis is None else scores.basis.pairs
    if table is None and scores.basis is not None:
        raise InvalidInput("directions of a rotary layer need the frequencies of their pairs; prescribe again.")
    # [heads, directions] frequencies, -1 for rows that are not rotated.
    rows = row_pairs(spec) if table is None else table
    chosen = [rows[head, : scores.keep.shape[1]][scores.keep[head, : rows.shape[1]]] for head in order]
    pairs = [row[row >= 0].tolist() for row in chosen]
    if any(frequencies[: len(frequencies) // 2] != frequencies[len(frequencies) // 2 :] for frequencies in pairs):
        raise InvalidInput("a decision keeps one row of a rotated pair: keep or remove both of them.")
    return tuple(tuple(frequencies[: len(frequencies) // 2]) for frequencies in pairs)


def _kept_by_any(scores: ScoreDecision, order: Sequence[int]) -> Bool[Tensor, "directions"]:
    """Returns the shared directions that any of these heads keeps."""
    return scores.keep[order].any(0) if order else torch.zeros_like(scores.keep[0])


def _in_order(sizes: Sequence[int], order: Sequence[int]) -> Int[Tensor, "indices"]:
    """Returns the indices of the rows of some heads, of which every head has `sizes[head]`, in this order."""
    rows = torch.arange(sum(sizes)).split(list(sizes))
    return torch.cat([NO_INDICES, *(rows[head] for head in order)])


# Query and key --------------------------------------------------------------------------------------------------------


def _copy_directions_(target: Attention, source: Attention, scores: ScoreDecision, order: Sequence[int]) -> None:
    """Copies the kept rows of query and key, and the strengths, into a layer of matching shape."""
    spec, small = source.spec, target.spec
    if small.traits.shares_directions:
        rows = torch.arange(sum(small.rows))
    elif spec.traits.shares_directions:  # a direction kept by two heads is stored twice
        rows = torch.nonzero(scores.keep[order])[:, 1]
    else:
        starts, parts = torch.tensor([0, *spec.rows]).cumsum(0), [NO_INDICES]
        for head in order:
            kept = torch.zeros(spec.rows[head], dtype=torch.bool)
            kept[: spec.ranks[head]] = scores.keep[head, : spec.ranks[head]]
            # The removed rows follow the kept ones where the small layer divides by the norms over all of them. A head
            # without directions attends uniformly, and needs no norm.
            stores_all = small.keeps_original_norms and bool(kept.any())
            chosen = torch.cat([torch.nonzero(kept), torch.nonzero(~kept)[: None if stores_all else 0]])
            parts.append(starts[head] + chosen.flatten())
        rows = torch.cat(parts)
    _copy_rows_(target.scores.query, source.scores.query, rows)
    _copy_rows_(target.scores.key, source.scores.key, rows)
    keep = torch.ones_like(scores.keep) if small.traits.shares_directions else scores.keep
    target.scores.set_strengths_([scores.strength[head, keep[head]] for head in order])


def _combine_directions_(
    target: Attention, source: Attention, scores: ScoreDecision, basis: Basis, order: Sequence[int]
) -> None:
    """Writes the kept directions of a basis into a layer of matching shape; either side is scaled by the root of the
    strength.
    """
    kept = _kept_by_any(scores, order)
    for name, table in (("query", basis.left), ("key", basis.right)):
        rows = _combined(getattr(source.scores, name), source.spec, table, shared=basis.shared)
        _write_rows_(getattr(target.scores, name), rows[0, kept] if basis.shared else _scaled(rows, scores, order))
    if basis.shared:
        # A direction that some head keeps is stored once; the strength of the other heads is zero there.
        target.scores.set_strengths_(list(torch.where(scores.keep, scores.strength, 0.0)[order][:, kept]))


def _mask_combined_directions_(attention: Attention, scores: ScoreDecision, basis: Basis) -> None:
    """Writes the kept directions of a basis into the rows of their head, and zeros into the rest; keeps every shape."""
    spec = attention.spec
    if basis.shared:
        raise NotSupported(
            "directions that all heads share (CP SlimAtt) have no mask: the original layer has no rows for them. "
            "Realize the prescription by='compress'."
        )
    pairs = None if basis.pairs is None else _kept_pairs(spec, scores, range(len(spec.heads)))
    # [heads, directions, 1]. A form without strengths has them in its rows: their root on either side.
    root = torch.where(scores.keep, scores.strength, 0.0).sqrt()[..., None]
    for side, table in ((attention.scores.query, basis.left), (attention.scores.key, basis.right)):
        rows = _combined(side, spec, table, shared=False)
        if pairs is None:
            parts = [head_rows[:rank] for head_rows, rank in zip(root * rows, spec.rows, strict=True)]
        else:
            # Pairs are the last rows of a head (`row_pairs`), at any rank: the zeros are between them and the others.
            parts = []
            for head, frequencies in enumerate(pairs):
                kept = _scaled(rows, scores, [head])
                num_others = len(kept) - 2 * len(frequencies)
                zeros = kept.new_zeros(spec.ranks[head] - len(kept), kept.shape[1])
                parts += [kept[:num_others], zeros, kept[num_others:]]
        _write_rows_(side, torch.cat(parts))
    if pairs is not None:
        attention.spec = attention.scores.spec = replace(spec, pairs=pairs)


def _combined(
    side: HeadLinear, spec: AttentionSpec, table: Tensor, *, shared: bool
) -> Float[Tensor, "owners directions augmented"]:
    """Returns the rows of a basis with their bias, in float64 on the CPU."""
    # In float64, because a basis may be ill-conditioned, and with the bias, which is combined like every other column.
    stored, owners = side.augmented(), (sum(spec.rows),) if spec.traits.shares_directions else spec.rows
    num_rows = table.shape[-1] // len(owners) if shared else table.shape[-1]
    padded = stored.new_zeros(len(owners), num_rows, stored.shape[1])
    for owner_rows, rows in zip(padded, stored.split(owners), strict=True):
        owner_rows[: rows.shape[0]] = rows  # a view of `padded`
    return table @ (padded.flatten(0, 1) if shared else padded)


def _scaled(rows: Tensor, scores: ScoreDecision, order: Sequence[int]) -> Float[Tensor, "rows augmented"]:
    """Returns the kept rows of these heads, times the roots of their strengths."""
    roots = [scores.strength[head, scores.keep[head]].sqrt()[:, None] for head in order]
    parts = [root * rows[head, scores.keep[head]] for root, head in zip(roots, order, strict=True)]
    return torch.cat([rows.new_zeros(0, rows.shape[-1]), *parts])  # also for no head at all


def _copy_rows_(target: HeadLinear, source: HeadLinear, rows: Int[Tensor, "rows"]) -> None:
    target.weight.copy_(source.weight[rows])
    if target.bias is not None and source.bias is not None:
        target.bias.copy_(source.bias[rows])


def _write_rows_(side: HeadLinear, augmented: Float[Tensor, "rows augmented"]) -> None:
    side.weight.copy_(augmented[:, :-1])
    if side.bias is not None:
        side.bias.copy_(augmented[:, -1])


# Value and output -----------------------------------------------------------------------------------------------------


def _mask_values_(attention: Attention, values: OutputDecision) -> None:
    """Writes the reduced values into the first features of every head, and zeros into the rest; keeps every shape."""
    value, output, bias = _reduced_values(attention, values)
    spec = attention.spec
    if attention.output.bias is None:
        raise InvalidInput(
            "the output projection of this layer has no bias that could absorb that of the values, so a mask cannot "
            "keep every shape; realize the prescription by='compress'."
        )
    # The first features of every head: reduced directions are combinations of all of them, and belong to none.
    starts = torch.tensor([0, *spec.value_dims]).cumsum(0).tolist()
    indices = torch.cat([start + torch.arange(rank) for start, rank in zip(starts, values.ranks, strict=False)])
    rows = value.new_zeros(sum(spec.value_dims), value.shape[1])
    columns = output.new_zeros(output.shape[0], sum(spec.value_dims))
    rows[indices], columns[:, indices] = value, output
    _write_values_(attention, rows, columns, bias)


def _reduced_values(
    attention: Attention, values: OutputDecision
) -> tuple[Float[Tensor, "kept width"], Float[Tensor, "width kept"], Float[Tensor, "width"]]:
    """Returns the reduced value rows, output columns and output bias, in float64; heads as in `attention`.

    The rows of the softmax sum to one, so a constant in the values adds a constant to the output. With o = attention @
    x + value bias, the bias of the output projection therefore absorbs all constants of decode @ encode @ (o - center)
    + center.
    """
    dims = attention.spec.value_dims
    # In float64, as the factors are: the rounding of the weights' own precision happens once, when they are written.
    stored = attention.value.augmented()
    encodes = values.encode.double().split(values.ranks)
    # Rows of `encode` are padded to the largest head. [ranks[head], width + 1] each, with the bias as last column.
    parts = zip(encodes, stored.split(list(dims)), strict=True)
    rows = [encode[:, : block.shape[0]] @ block for encode, block in parts]
    augmented = torch.cat([stored.new_zeros(0, stored.shape[1]), *rows])
    weight = attention.output.weight.detach().cpu().double()
    # `decode` and `center` are padded to the widest head, and the weight is not.
    widest = len(values.center) // max(len(dims), 1)
    present = torch.cat([NO_INDICES, *(head * widest + torch.arange(width) for head, width in enumerate(dims))])
    decode, center = values.decode.double()[present], values.center.double()[present]
    output = weight @ decode
    own_bias = attention.output.bias
    bias = weight.new_zeros(weight.shape[0]) if own_bias is None else own_bias.detach().cpu().double()
    # encode @ center by head: a row of `encode` is nonzero on its own head only.
    by_head = zip(encodes, center.split(dims), strict=True)
    encoded_centers = torch.cat([encode[:, : len(mean)] @ mean for encode, mean in by_head])
    bias = bias + weight @ center + output @ (augmented[:, -1] - encoded_centers)
    return augmented[:, :-1], output, bias


def _write_values_(target: Attention, value: Tensor, output: Tensor, bias: Tensor) -> None:
    target.value.weight.copy_(value)
    target.output.weight.copy_(output)
    if target.value.bias is not None:
        target.value.bias.zero_()
    if target.output.bias is not None:
        target.output.bias.copy_(bias)
