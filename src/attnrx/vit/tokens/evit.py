"""EViT: keeps the patches of the highest class attention, and one fused token for all others."""

from dataclasses import dataclass, field

from attnrx.vit.tokens.class_attention import ClassAttention
from attnrx.vit.tokens.reducer import Selecting
from attnrx.vit.tokens.soft import Packaging


@dataclass(frozen=True)
class EViT(Packaging):
    """Keeps the patches of the highest class attention and fuses the others, weighted by it (Liang et al., 2022).

    The fused token is the mean of the others, weighted by their class attention, so that it has the size of a patch in
    a model that was not trained with it. As published it is the plain sum of class attention times patch:
    `normalized=false`. As published tokens are pruned between the attention and the MLP of a layer; here, as with every
    reducer, before the next layer. Other `scores` can replace class attention.
    """

    scores: Selecting = field(default=ClassAttention())
    normalized: bool = True
