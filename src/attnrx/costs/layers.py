"""The costs of one transformer block in closed form, from its spec alone, without building or running it."""

from dataclasses import replace

from attnrx.costs.model_costs import LayerCosts, PartCosts
from attnrx.spec import AttentionSpec


def layer_costs(
    spec: AttentionSpec, tokens: int, hidden: int, mlp_ranks: tuple[int | None, int | None] = (None, None)
) -> LayerCosts:
    """Returns the costs of a pre-norm block: attention of this spec, an MLP with `hidden` features, two LayerNorms.

    `mlp_ranks` are those of the MLP's two maps if they are stored as two factors each. The MACs are those of the spec;
    a backend that pads heads to a common rank computes more.
    """
    rows, rank, features = sum(spec.rows), sum(spec.ranks), sum(spec.reads)
    # A head without directions returns the mean of its values, which needs no product of tokens with tokens.
    attending = sum(reads for own, reads in zip(spec.ranks, spec.reads, strict=True) if own)
    strengths = rank if spec.has_strengths else 0
    query, key = (linear_costs(spec.width, rows, tokens, bias=spec.has_bias(side)) for side in ("query", "key"))
    value = linear_costs(spec.width, features, tokens, bias=spec.has_bias("value"))
    output = linear_costs(features, spec.width, tokens, bias=spec.has_bias("output"))
    first = factored_costs(spec.width, hidden, tokens, mlp_ranks[0])
    second = factored_costs(hidden, spec.width, tokens, mlp_ranks[1])
    return LayerCosts(
        query_key=query + key,
        scores=PartCosts(0, tokens * tokens * rank),
        diagonal=PartCosts(strengths, tokens * strengths),
        fusion=PartCosts(),
        value_output=value + output,
        read_out=PartCosts(0, tokens * tokens * attending),
        mlp=first + second,
        layer_norms=_twice(norm_costs(spec.width)),
        directions=rows if spec.shares_directions else rank,
        direction=direction_costs(spec, tokens),
        spec=spec,
        tokens=tokens,
    )


def with_fusion(layer: LayerCosts) -> LayerCosts:
    """Returns the costs of the layer with the fusion of IrrAtt (Algorithm 3).

    A heads x heads matrix mixes the score maps. Realized heads have their own maps, for which that matrix is the
    identity and costs nothing. Mixed maps are never empty, so every head multiplies its values, even one without
    directions.
    """
    heads, pairs = len(layer.spec.heads), layer.tokens**2
    read_out = PartCosts(0, pairs * sum(layer.spec.reads))
    return replace(layer, fusion=PartCosts(heads**2, pairs * heads**2), read_out=read_out)


def direction_costs(spec: AttentionSpec, tokens: int) -> PartCosts:
    """Returns the costs of one direction: a row and a bias of query and key, its strengths, its share of the scores.

    For SVDA that is 2 (width + 1) + 1 parameters and tokens (2 width + tokens + 1) MACs; with the original norms
    the projections stay, and only strength and scores are saved. A shared direction has a strength and scores in every
    head.
    """
    users = len(spec.heads) if spec.shares_directions else 1
    strength = PartCosts(users, tokens * users) if spec.has_strengths else PartCosts()
    scores = PartCosts(0, tokens * tokens * users)
    if spec.keeps_original_norms:
        return scores + strength
    query, key = (linear_costs(spec.width, 1, tokens, bias=spec.has_bias(side)) for side in ("query", "key"))
    return query + key + scores + strength


def factored_costs(inputs: int, outputs: int, tokens: int, rank: int | None) -> PartCosts:
    """Returns the costs of a linear map on every token, as one matrix or as two factors of a rank.

    The second factor has the bias.
    """
    if rank is None:
        return linear_costs(inputs, outputs, tokens)
    return linear_costs(inputs, rank, tokens, bias=False) + linear_costs(rank, outputs, tokens)


def linear_costs(inputs: int, outputs: int, tokens: int, bias: bool = True) -> PartCosts:
    """Returns the costs of a linear map on every token."""
    return PartCosts((inputs + bias) * outputs, tokens * inputs * outputs)


def norm_costs(width: int) -> PartCosts:
    """Returns the costs of a LayerNorm: a gain and a bias per feature, no MACs."""
    return PartCosts(2 * width, 0)


def _twice(part: PartCosts) -> PartCosts:
    return part + part
