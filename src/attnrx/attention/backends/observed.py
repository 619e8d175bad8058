"""A backend that shows every intermediate to an observer while the model runs."""

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
    """Computes as `Eager` does, all heads in one padded bucket, and hands the intermediates to `observe`.

    A head of rank 0 has zero rows here, so its scores are zero and its attention uniform, as it must be. Standing in
    for a `capture` backend it counts tokens by their size and passes on what a reducer needs, as that would.
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
        """Puts all heads together."""
        most = max((*spec.ranks, 1))
        return (Bucket(0, len(spec.ranks), most, most),)

    def reads(self, spec: AttentionSpec, context: AttentionContext) -> tuple[int, ...]:
        """Pads all heads to the one that reads out most."""
        return (max((*spec.reads, 1)),) * len(spec.heads)

    def attend(self, factors: ScoreFactors, value: Float[Tensor, "batch heads keys reads"]) -> Tensor:
        """Computes the read-out and shows how."""
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
