"""Distillation from the block outputs of another model."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from attnrx.errors import InvalidInput
from attnrx.losses.loss import Loss, LossContext, require_weight
from attnrx.losses.teaching import taught
from attnrx.shapes import Float, Tensor


@dataclass(frozen=True)
class FeatureDistillation(Loss):
    """The mean squared difference between the output tokens of the model's blocks and the teacher's.

    Every token is first centred and scaled to unit variance over its features, as a LayerNorm without weights does
    (whitened targets: Wei et al., 2022, arXiv 2205.14141): a few features of a ViT's tokens are a hundred times larger
    than the rest and would dominate. 0 is equal, 2 is unrelated. `last` is the number of blocks, from the last one;
    None means all. The teacher must have equal depth, width and tokens.
    """

    reads_features: ClassVar[bool] = True
    teacher: str
    last: int | None = None
    weight: float = 1.0
    weights: str | None = None

    def __post_init__(self):
        require_weight(self)
        if self.last is not None and self.last < 1:
            raise InvalidInput(f"{self}: last counts blocks from the last one; give 1 or more, or None for all.")

    def __call__(self, context: LossContext) -> Float[Tensor, ""]:
        """Returns the mean over the selected blocks, the images, the tokens and the features."""
        theirs, own = taught(context, self.teacher, self.weights).features, context.features
        shapes = [[tuple(tokens.shape[1:]) for tokens in features] for features in (own, theirs)]
        if shapes[0] != shapes[1]:
            raise InvalidInput(
                f"the blocks of the teacher {self.teacher} have (tokens, width) {shapes[1]} and those of the model "
                f"{shapes[0]}; take the model that this one was made from, or learn from its logits alone."
            )
        if self.last is not None and self.last > len(own):
            raise InvalidInput(f"{self}: the model has {len(own)} blocks only.")
        selected = slice(None) if self.last is None else slice(-self.last, None)
        pairs = zip(own[selected], theirs[selected], strict=True)
        return torch.stack([F.mse_loss(_whitened(mine), _whitened(other)) for mine, other in pairs]).mean()


def _whitened(tokens: Float[Tensor, "batch tokens features"]) -> Float[Tensor, "batch tokens width"]:
    exact = tokens.to(torch.promote_types(tokens.dtype, torch.float32))
    return F.layer_norm(exact, exact.shape[-1:])
