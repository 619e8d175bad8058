"""What one attention layer computed for one batch, shown to whoever diagnoses or verifies it."""

from dataclasses import dataclass

from attnrx.shapes import Float, Tensor


@dataclass(frozen=True)
class Observation:
    """All intermediates of one layer, heads in storage order, directions and what heads read out padded with zeros
    to the largest rank.

    `query` and `key` are the rows as they enter the scores: divided by their norms where the form has norms, before
    the strength. score = scale * (query * strength) @ key^T, attention = softmax(score), output = attention @ value;
    the layer's result is the sum over heads of output @ readout, plus a bias.
    """

    query: Float[Tensor, "batch tokens heads directions"]
    key: Float[Tensor, "batch tokens heads directions"]
    strength: Float[Tensor, "heads directions"] | None
    scale: float
    scores: Float[Tensor, "batch heads queries keys"]
    attention: Float[Tensor, "batch heads queries keys"]
    value: Float[Tensor, "batch heads keys reads"]
    output: Float[Tensor, "batch heads queries reads"]
    readout: Float[Tensor, "heads reads width"]
