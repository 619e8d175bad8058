"""The costs of one transformer block in closed form, from its spec alone: nothing is built and nothing is run."""

from attnrx.costs.parts import LayerCosts, PartCosts
from attnrx.spec import AttentionSpec


def layer_costs(spec: AttentionSpec, tokens: int, hidden: int) -> LayerCosts:
    """Prices a pre-norm block: attention as `spec` says, an MLP with `hidden` features, two LayerNorms.

    What is counted is the arithmetic that the spec asks for; a backend that pads heads to a common rank computes more.
    """
    rows, rank, features = sum(spec.rows), sum(spec.ranks), len(spec.heads) * spec.head_dim
    # A head without directions reads out the mean of its values, which takes no product of tokens with tokens.
    attending = sum(1 for own in spec.ranks if own)
    strengths = rank if spec.form == "svda" else 0
    return LayerCosts(
        query_key=_twice(linear_costs(spec.width, rows, tokens)),
        scores=PartCosts(0, tokens * tokens * rank),
        diagonal=PartCosts(strengths, tokens * strengths),
        value_output=linear_costs(spec.width, features, tokens) + linear_costs(features, spec.width, tokens),
        read_out=PartCosts(0, tokens * tokens * attending * spec.head_dim),
        mlp=linear_costs(spec.width, hidden, tokens) + linear_costs(hidden, spec.width, tokens),
        layer_norms=_twice(norm_costs(spec.width)),
        directions=rank,
        direction=direction_costs(spec, tokens),
    )


def direction_costs(spec: AttentionSpec, tokens: int) -> PartCosts:
    """What one direction of one head costs: a row and a bias of query and key, its strength, its share of the scores.

    For SVDA that is 2 (width + 1) + 1 parameters and tokens (2 width + tokens + 1) MACs; with the original norms
    the projections stay, and only strength and scores are left to save.
    """
    strength = PartCosts(1, tokens) if spec.form == "svda" else PartCosts()
    scores = PartCosts(0, tokens * tokens)
    if spec.norms == "original":
        return scores + strength
    return _twice(linear_costs(spec.width, 1, tokens)) + scores + strength


def linear_costs(inputs: int, outputs: int, tokens: int) -> PartCosts:
    """Prices a linear map with a bias on every token."""
    return PartCosts((inputs + 1) * outputs, tokens * inputs * outputs)


def norm_costs(width: int) -> PartCosts:
    """Prices a LayerNorm: a gain and a bias per feature, no MACs."""
    return PartCosts(2 * width, 0)


def _twice(part: PartCosts) -> PartCosts:
    return part + part
