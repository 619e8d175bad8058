"""IrrAtt's training constraint (Eq. 7): strengths are nonnegative, and each shared direction has one owner head."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from attnrx.support.errors import NotSupported
from attnrx.support.shapes import Float, Tensor
from attnrx.training.losses import Loss, LossContext
from attnrx.vit.models import family_of
from attnrx_lab.decompositions import nonnegative_units, ownership_penalty
from attnrx_lab.shared_attention import SharedForm


@dataclass(frozen=True)
class FusionOwnership(Loss):
    """Penalizes shared directions that several heads use, in place of the constraint S S^T = I (IrrAtt, Eq. 7).

    The penalty of a direction is (sum of |s|)^2 / (sum of s^2) - 1 over its strengths s in all heads. The penalty is 0
    if and only if one head uses the direction, and heads - 1 if all heads use it equally. The loss is the mean over the
    directions of all layers. Its weight grows linearly over the training, from 0 to its full value, so that the heads
    can first choose their directions. The constraint also requires S >= 0. To enforce this part, train inside
    `nonnegative_fusion`. After training, the rule `fusion_owner` assigns each direction to one head.
    """

    weight: float = 1.0

    def __call__(self, context: LossContext) -> Float[Tensor, ""]:
        fusions = [form.strength for form in _shared_forms(context.model)]
        # The mean is over all directions, not over layers, because layers may share different numbers of directions.
        total = torch.stack([ownership_penalty(fusion) for fusion in fusions]).sum()
        return context.progress * total / sum(fusion.shape[1] for fusion in fusions)


@contextmanager
def nonnegative_fusion(model: nn.Module) -> Iterator[None]:
    """Projects a model's fusion matrices onto the set of allowed matrices after each optimizer step in the context.

    Training inside the context is therefore projected gradient descent. A reparametrization (e.g. by squares) would
    also keep the values nonnegative, but values at zero would receive no gradient.

    Raises:
        NotSupported: No heads of the model share directions.
    """
    normalize_fusion_(model)
    project_fusion_(model)
    hook = register_optimizer_step_post_hook(lambda *_: project_fusion_(model))
    try:
        yield
    finally:
        hook.remove()


@torch.no_grad()
def project_fusion_(model: nn.Module) -> None:
    """Projects every fusion matrix onto the set of matrices with nonnegative unit columns (IrrAtt, Eq. 7).

    Raises:
        NotSupported: No heads of the model share directions.
    """
    for form in _shared_forms(model):
        form.strength.copy_(nonnegative_units(form.strength))


@torch.no_grad()
def normalize_fusion_(model: nn.Module) -> None:
    """Moves the sign and length of every fusion column into the query, so that the projection changes the matrix less.

    Raises:
        NotSupported: No heads of the model share directions.
    """
    for form in _shared_forms(model):
        fusion = form.strength
        # Each column gets the sign of its largest value, because the projection sets values of the other sign to zero.
        peak = fusion.gather(0, fusion.abs().argmax(0, keepdim=True))[0]
        factor = torch.where(peak < 0, -1.0, 1.0) * fusion.norm(dim=0)
        form.query.weight.mul_(factor[:, None])
        if form.query.bias is not None:
            form.query.bias.mul_(factor)
        fusion.div_(torch.where(factor == 0, 1.0, factor))  # a column of zeros stays zero


def _shared_forms(model: nn.Module) -> list[SharedForm]:
    forms = [layer.scores for layer in family_of(model).attention(model)]
    shared = [form for form in forms if isinstance(form, SharedForm) and form.strength.numel()]
    if not shared:
        raise NotSupported(
            "the constraint is on directions that heads share with a strength for each, and this model has none: "
            "realize a prescription of the rule shared_rank with form=cp or form=epc first."
        )
    return shared
