"""Parameters and MACs of the modules of other libraries, counted on the modules."""

import math
from collections.abc import Sequence
from typing import Any

from torch import nn

from attnrx.vit.attention import Attention
from attnrx.vit.costs import PartCosts
from attnrx.vit.models.mlp import rank_of


def num_params(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def projection_params(attention: Attention) -> int:
    """Returns the parameters of an attention layer that its spec counts, without inner norms."""
    return sum(num_params(part) for part in (attention.scores, attention.value, attention.output))


def matrix_entries(module: nn.Module) -> int:
    """Returns the entries of all linear maps in a module: its MACs for one token."""
    return sum(linear.weight.numel() for linear in module.modules() if isinstance(linear, nn.Linear))


def classifier_macs(head: nn.Module, tokens: int) -> int:
    """Returns the MACs of a classifier on one token; a pooling by attention has one query and keys of all tokens."""
    total = matrix_entries(head)
    for part in head.modules():
        if isinstance(part, nn.MultiheadAttention):
            # Its fused projection of query, key and value is a parameter and no Linear, so `matrix_entries` lacks it.
            width = part.embed_dim
            total += (1 + 2 * tokens) * width**2 + 2 * tokens * width
        elif type(part).__name__ == "AttentionPoolLatent":
            latent: Any = part  # one query
            # `matrix_entries` has its projections of one token; keys and values are of all tokens, and both products
            # come on top.
            total += (tokens - 1) * latent.kv.weight.numel() + tokens * latent.kv.out_features
    return total


def mlp_costs(
    mlp: Sequence[nn.Module],
    tokens: int,
    maps: tuple[Any, ...],
    ranks: tuple[int | None, ...],
    hidden: int,
    gate: Any = None,
) -> PartCosts:
    """Returns the costs of the modules of an MLP with its `maps`, if given, in these ranks (None: one matrix), with
    `hidden` features between them; `gate` is the map of the gate of a gated MLP.
    """
    # What the maps save is subtracted from what the modules have, so that further parts (a norm, a gate) stay counted.
    saved, biases = 0, 0
    for which, (linear, rank) in enumerate(zip(maps, ranks, strict=True)):
        sides = [linear.in_features, linear.out_features]
        if which == 0:
            before, bias = sides[1], getattr(linear, "bias", None)
            has_bias = bias is not None if rank_of(linear) is None else linear.second.bias is not None
            biases = (before - hidden) * has_bias
        sides[1 - which] = hidden
        saved += matrix_entries(linear) - (math.prod(sides) if rank is None else rank * sum(sides))
    if gate is not None:
        gone = gate.out_features - hidden
        saved, biases = saved + gone * gate.in_features, biases + gone * (gate.bias is not None)
    return PartCosts(sum(map(num_params, mlp)) - saved - biases, tokens * (sum(map(matrix_entries, mlp)) - saved))
