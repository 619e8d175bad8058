"""A backend that shows every intermediate to an observer while the model runs."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from attnrx.attention.backends.backend import Backend
from attnrx.attention.backends.eager import scores
from attnrx.attention.factors import Bucket, ScoreFactors, exact_buckets
from attnrx.shapes import Float, Tensor


@dataclass(frozen=True)
class Observation:
    """What one bucket of heads of one layer computed for one batch; the scores lack no row constant."""

    factors: ScoreFactors
    scores: Float[Tensor, "batch heads queries keys"]
    attention: Float[Tensor, "batch heads queries keys"]
    value: Float[Tensor, "batch heads keys head_dim"]
    output: Float[Tensor, "batch heads queries head_dim"]


class Observed(Backend):
    """Computes as `Eager` does and hands every bucket's intermediates to `observe`."""

    def __init__(self, observe: Callable[[Observation], None]):
        self.observe = observe

    def buckets(self, ranks: tuple[int, ...]) -> tuple[Bucket, ...]:
        """Groups only neighbours of equal rank."""
        return exact_buckets(ranks)

    def attend(self, factors: ScoreFactors, value: Float[Tensor, "batch heads tokens head_dim"]) -> Tensor:
        """Computes the read-out and shows how."""
        logits = scores(factors)
        attention = torch.softmax(logits, dim=-1)
        output = attention @ value
        self.observe(Observation(factors, logits, attention, value, output))
        return output
