"""Evo-ViT: global class attention, a moving average over the layers."""

from dataclasses import dataclass

from torch import nn

from attnrx.errors import InvalidInput
from attnrx.shapes import Float, Tensor
from attnrx.tokens.reducer import Selecting
from attnrx.tokens.state import TokenState


@dataclass(frozen=True)
class EvoViT(Selecting):
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

    @property
    def needs(self) -> tuple[str, ...]:
        """The class attention of all layers."""
        return ("class_attention", "class_attention_sum")

    def accumulate(
        self, before: Float[Tensor, "batch patches"] | None, scores: Float[Tensor, "batch patches"]
    ) -> Float[Tensor, "batch patches"]:
        """Blends the class attention of one layer into the global one."""
        return scores if before is None else self.alpha * before + (1 - self.alpha) * scores

    def relevance(self, state: TokenState, predictor: nn.Module) -> Float[Tensor, "batch patches"]:
        assert state.accumulated is not None
        return state.accumulated
