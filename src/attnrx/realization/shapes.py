"""The spec of a compressed layer, computed before the layer is built."""

from dataclasses import replace

import torch

from attnrx.errors import NotSupported
from attnrx.prescription import LayerPrescription, OutputDecision, ScoreDecision
from attnrx.spec import BIASES, AttentionSpec


def head_order(decision: ScoreDecision) -> list[int]:
    """Returns the kept heads in the order in which the compressed layer stores them: by descending rank."""
    heads = torch.nonzero(decision.heads).flatten().tolist()
    return sorted(heads, key=lambda head: -decision.ranks[head])


def compressed_spec(spec: AttentionSpec, layer: LayerPrescription, norms: str = "renormalized") -> AttentionSpec:
    """Returns the spec of the compressed layer.

    Rewritten directions need no key bias, which the softmax cancels. Rewritten values need no bias either: the bias of
    the output projection absorbs it.
    """
    order = head_order(layer.qk)
    heads = tuple(spec.heads[head] for head in order)
    small = _with_values(_with_directions(spec, layer.qk, order, norms), layer.outputs.get("vo"), order)
    return replace(small, heads=heads)


def _with_directions(spec: AttentionSpec, layer: ScoreDecision, order: list[int], norms: str) -> AttentionSpec:
    heads = tuple(spec.heads[head] for head in order)
    if layer.is_shared:
        rank = int(layer.keep[order].any(0).sum()) if order else 0
        shared = replace(spec, form="shared", original_rank=len(spec.heads) * spec.original_rank)
        return _without(shared.with_ranks((rank,) * len(order), heads, "none"), "key")
    ranks = tuple(layer.ranks[head] for head in order)
    if spec.shares_directions and not bool(layer.keep[order].all()):  # no longer shared: each head stores its own rows
        return replace(spec, form="dense").with_ranks(ranks, heads, "none")
    if layer.basis is not None:
        return _without(spec.with_ranks(ranks, heads, spec.norms), "key")
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


def _with_values(spec: AttentionSpec, values: OutputDecision | None, order: list[int]) -> AttentionSpec:
    if values is None:
        return spec
    if len(order) != len(values.ranks):
        raise NotSupported(
            "the values are prescribed for all heads together, and some heads are removed: realize the removal first, "
            "and diagnose the smaller model."
        )
    value_ranks = tuple(values.ranks[head] for head in order)
    present = (*spec.biases, "output")
    biases = tuple(name for name in BIASES if name in present and name != "value")
    return replace(spec, value_ranks=value_ranks, biases=biases)


def _without(spec: AttentionSpec, bias: str) -> AttentionSpec:
    return replace(spec, biases=tuple(name for name in spec.biases if name != bias))
