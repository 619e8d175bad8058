"""dTPS: every patch that leaves is squeezed into the patch it is most like."""

import math
from dataclasses import dataclass, field

import torch
from torch import nn

from attnrx.shapes import Tensor
from attnrx.tokens.dynamicvit import DynamicViT
from attnrx.tokens.reducer import Reduction, Selecting, Shape, best, taken
from attnrx.tokens.seen import Seen
from attnrx.tokens.soft import Soft


@dataclass(frozen=True)
class DTPS(Soft):
    """Keeps what the scores say, and squeezes every other patch into the kept one it is most like (Wei et al., 2023).

    Alike is the cosine c of two tokens. A kept patch becomes the mean of itself and of those matched to it, weighted by
    exp(c); its own weight is exp(1). Attention counts it once. `scores` is DynamicViT's predictor (dTPS), class
    attention (eTPS, but before a layer rather than inside it), SPOT's, or any selecting reducer.
    """

    scores: Selecting = field(default_factory=DynamicViT)

    def predictor_macs(self, shape: Shape, patches: int, count: int) -> int:
        """MACs of the predictor of the scores, and of comparing every patch with those that are kept."""
        return super().predictor_macs(shape, patches, count) + patches * count * shape.width

    def reduce(self, seen: Seen, count: int, predictor: nn.Module) -> Reduction:
        """Keeps the best and squeezes the rest into them."""
        kept = best(self.scores.relevance(seen, predictor), seen.there, count)
        leaving = seen.there.scatter(1, kept, 0.0)
        return Reduction(kept, squeezed(seen.patches, kept, leaving))


def squeezed(patches: Tensor, kept: Tensor, leaving: Tensor) -> Tensor:
    """Gives the kept patches with those that are `leaving` (1, others 0) in them."""
    own = taken(patches, kept)
    unit = nn.functional.normalize(patches, dim=-1)
    closeness, host = (unit @ taken(unit, kept).transpose(1, 2)).max(-1)
    weights = closeness.exp() * leaving
    total = torch.full_like(own[..., 0], math.e).scatter_add(1, host, weights)
    brought = (own * math.e).scatter_add(1, host[..., None].expand_as(patches), patches * weights[..., None])
    return brought / total[..., None]
