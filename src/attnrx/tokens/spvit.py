"""SPViT: fuses the patches that a predictor drops into one token."""

from dataclasses import dataclass, field

from attnrx.tokens.dynamicvit import DynamicViT
from attnrx.tokens.reducer import Selecting
from attnrx.tokens.soft import Packaging


@dataclass(frozen=True)
class SPViT(Packaging):
    """Keeps the patches of the highest scores and fuses the others, weighted by their probability of keep (Kong et al.,
    2022).

    The fused token is the paper's. Its selector, which weights the scores of every head's share of the features, is not
    implemented: `scores` is DynamicViT's predictor, or SPOT's as in SPOT's Table 3, or any selecting reducer.
    """

    scores: Selecting = field(default=DynamicViT())
