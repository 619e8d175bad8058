"""The loss by which SPOT compares the tokens of LV-ViT with a teacher's tokens."""

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F

from attnrx.support.errors import InvalidInput, NotSupported
from attnrx.support.shapes import Float, Tensor
from attnrx.training.losses import LossContext, TeacherLoss, teacher_outputs
from attnrx.vit.models import reduction_of


@dataclass(frozen=True)
class TokenSimilarity(TeacherLoss):
    """One minus the mean cosine similarity of the kept patches' final tokens in model and teacher (SPOT, Eq. 14).

    The teacher must have the same number of patches and the same width as the model. SPOT uses this loss with weight 10
    for LV-ViT, but not for DeiT.
    """

    reads_features: ClassVar[bool] = True
    teacher: str
    weight: float = 10.0
    weights: str | None = None

    def __call__(self, context: LossContext) -> Float[Tensor, ""]:
        reduction, run = reduction_of(context.model), context.run
        if reduction is None or run is None or run.sizes is None or run.patch_indices is None:
            raise NotSupported(
                "TokenSimilarity needs token pruning, and the run of the step in its context (recording_tokens); "
                "attach a policy or omit the loss."
            )
        _, teacher_features = teacher_outputs(context, self.source)
        target, tokens = teacher_features[-1], context.features[-1]
        if target.shape != tokens.shape:
            raise InvalidInput(
                f"the teacher {self.teacher} ends with (tokens, width) {tuple(target.shape[1:])}, the model with "
                f"{tuple(tokens.shape[1:])}; take the model that this one was made from, and a reducer that is learned."
            )
        prefix = reduction.shape.layout.prefix
        # An added (fused) token has no counterpart in the teacher.
        mask = ((run.sizes[:, prefix:] > 0) & (run.patch_indices >= 0)).to(tokens.dtype)
        cosines = F.cosine_similarity(tokens[:, prefix:], target[:, prefix:].to(tokens.dtype), dim=-1)
        return (((1 - cosines) * mask).sum(1) / mask.sum(1).clamp_min(1)).mean()  # an image may keep no patch
