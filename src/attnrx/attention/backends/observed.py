"""A backend that passes all intermediate results to an observer."""

from collections.abc import Callable

from attnrx.attention.backends.backend import Backend
from attnrx.attention.backends.capture import AttentionCapture, sized_softmax
from attnrx.attention.backends.eager import scores
from attnrx.attention.context import AttentionContext
from attnrx.attention.factors import Bucket, ScoreFactors
from attnrx.observation import Observation
from attnrx.shapes import Float, Tensor
from attnrx.spec import AttentionSpec


class Observed(Backend):
    """Computes as `Eager` does, all heads in one padded bucket, and passes the intermediate results to `observe`.

    A head of rank 0 has zero rows, so its scores are zero and its attention is uniform. In place of a `capture` backend
    it weights tokens by their size and captures the same quantities.
    """

    watches = True

    def __init__(
        self,
        observe: Callable[[Observation], None],
        readout: Float[Tensor, "heads reads width"],
        capture: AttentionCapture | None = None,
    ):
        self.observe = observe
        self.readout = readout
        self.capture = capture

    def buckets(self, spec: AttentionSpec, context: AttentionContext) -> tuple[Bucket, ...]:
        most = max((*spec.ranks, 1))
        return (Bucket(0, len(spec.ranks), most, most),)

    def reads(self, spec: AttentionSpec, context: AttentionContext) -> tuple[int, ...]:
        """Pads all heads to the largest value dimension."""
        return (max((*spec.reads, 1)),) * len(spec.heads)

    def attend(self, factors: ScoreFactors, value: Float[Tensor, "batch heads keys reads"]) -> Tensor:
        """Computes the output and passes the intermediate results to the observer."""
        logits = scores(factors)
        attention = sized_softmax(logits, None if self.capture is None else self.capture.sizes())
        output = attention @ value
        if self.capture is not None:
            self.capture.pass_on(attention, factors, value)
        self.observe(
            Observation(
                factors.query.expand(-1, -1, value.shape[1], -1),
                factors.key.expand(-1, -1, value.shape[1], -1),
                factors.strength,
                factors.scale,
                logits,
                attention,
                value,
                output,
                self.readout,
            )
        )
        return output
