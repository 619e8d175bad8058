"""The intermediate tensors of one attention layer for one batch, passed to diagnostics and checks."""

from dataclasses import dataclass

from attnrx.support.shapes import Float, Tensor


@dataclass(frozen=True)
class Observation:
    """All intermediates of one layer; heads in storage order, directions and value dimensions zero-padded to the
    largest rank.

    `query` and `key` are the rows that enter the scores: divided by their norms if the form has norms, before the
    strength is applied. score = scale * (query * strength) @ key^T, attention = softmax(score), output = attention @
    value; the layer's result is the sum over heads of output @ readout, plus a bias.
    """

    # Padded, so that heads of different ranks fit one tensor; zeros change neither scores nor outputs.
    query: Float[Tensor, "batch tokens heads directions"]
    key: Float[Tensor, "batch tokens heads directions"]
    strength: Float[Tensor, "heads directions"] | None
    scale: float
    scores: Float[Tensor, "batch heads queries keys"]
    attention: Float[Tensor, "batch heads queries keys"]
    value: Float[Tensor, "batch heads keys v_head_dim"]
    output: Float[Tensor, "batch heads queries v_head_dim"]
    readout: Float[Tensor, "heads v_head_dim width"]
