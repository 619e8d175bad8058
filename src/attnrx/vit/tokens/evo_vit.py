"""Evo-ViT: global class attention, a moving average over the layers."""

from dataclasses import dataclass

from attnrx.support.errors import InvalidInput
from attnrx.vit.tokens.attention_average import AttentionAverage
from attnrx.vit.tokens.reducer import PerPatch


@dataclass(frozen=True)
class EvoViT(AttentionAverage):
    """Keeps the patches of the highest global class attention (Xu et al., AAAI 2022).

    The class attention of every layer, averaged over the heads, is blended into that of the previous layers with the
    weight 1 - `alpha`: G of the first layer is its own, then G = alpha G + (1 - alpha) A. In the paper the patches that
    are not selected remain as placeholders, updated by one representative token; here they are pruned, and
    `evit(scores=evo_vit)` keeps one fused token for them.
    """

    alpha: float = 0.5

    def __post_init__(self):
        if not 0 <= self.alpha < 1:
            raise InvalidInput(f"{self}: alpha is the weight of the previous layers; give a number in [0, 1).")

    def accumulate(self, before: PerPatch | None, scores: PerPatch) -> PerPatch:
        return scores if before is None else self.alpha * before + (1 - self.alpha) * scores
