"""Similarity of the kept tokens to the teacher's."""

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F

from attnrx.errors import InvalidInput, NotSupported
from attnrx.losses.loss import Loss, LossContext, require_weight
from attnrx.losses.teaching import taught
from attnrx.models import reduction_of
from attnrx.shapes import Float, Tensor


@dataclass(frozen=True)
class TokenSimilarity(Loss):
    """One minus the cosine between the last layer's tokens and the teacher's, over the kept patches (Eq. 14).

    The teacher must have equal patches and width. SPOT uses it with weight 10 for LV-ViT and without it for DeiT.
    """

    reads_features: ClassVar[bool] = True
    teacher: str
    weight: float = 10.0
    weights: str | None = None

    def __post_init__(self):
        require_weight(self)

    def __call__(self, context: LossContext) -> Float[Tensor, ""]:
        """Returns the mean over the kept patches, over all images of the step."""
        reduction = reduction_of(context.model)
        if reduction is None or reduction.run.sizes is None or reduction.run.patch_indices is None:
            raise NotSupported("TokenSimilarity needs token pruning, and this model has none; omit the loss.")
        theirs, own = taught(context, self.teacher, self.weights).features[-1], context.features[-1]
        if theirs.shape != own.shape:
            raise InvalidInput(
                f"the teacher {self.teacher} ends with (tokens, width) {tuple(theirs.shape[1:])}, the model with "
                f"{tuple(own.shape[1:])}; take the model that this one was made from, and a reducer that is learned."
            )
        prefix = reduction.shape.layout.prefix
        patch_indices = reduction.run.patch_indices  # an added (fused) token has no counterpart in the teacher
        stay = ((reduction.run.sizes[:, prefix:] > 0) & (patch_indices >= 0)).to(own.dtype)
        alike = F.cosine_similarity(own[:, prefix:], theirs[:, prefix:].to(own.dtype), dim=-1)
        return (((1 - alike) * stay).sum(1) / stay.sum(1).clamp_min(1)).mean()
