"""SPViT: fuses the patches that its selector drops into one token."""

from dataclasses import dataclass, field

from attnrx.vit.tokens.head_selector import HeadSelector
from attnrx.vit.tokens.reducer import Selecting
from attnrx.vit.tokens.soft import Packaging


@dataclass(frozen=True)
class SPViT(Packaging):
    """Keeps the patches of the highest scores and fuses the others, weighted by their probability of keep (Kong et al.,
    2022).

    `scores` is the paper's selector, or SPOT's predictor as in SPOT's Table 3, or any selecting reducer. The paper also
    searches the layers of the stages by latency; here they are the policy's.
    """

    scores: Selecting = field(default=HeadSelector())
