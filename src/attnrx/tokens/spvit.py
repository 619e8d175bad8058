"""SPViT: the patches that a predictor would drop become one package token."""

from dataclasses import dataclass, field

from attnrx.tokens.dynamicvit import DynamicViT
from attnrx.tokens.reducer import Selecting
from attnrx.tokens.soft import Packaging


@dataclass(frozen=True)
class SPViT(Packaging):
    """Keeps what the scores say and packages the others, weighted by their probability of keep (Kong et al., 2022).

    The packaging is the paper's; its selector, which weighs the scores of every head's share of the features, is not
    here: `scores` is DynamicViT's predictor, or SPOT's as in SPOT's Table 3, or any selecting reducer.
    """

    scores: Selecting = field(default_factory=DynamicViT)
