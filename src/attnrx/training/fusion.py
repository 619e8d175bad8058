"""The constraint on the fusion matrix in training: nonnegative, columns of length one (IrrAtt, Eq. 7)."""

import torch
from torch import nn

from attnrx.attention.forms import SharedForm
from attnrx.decompositions import nonnegative_units
from attnrx.errors import NotSupported
from attnrx.models import family_of
from attnrx.training.sharding import full_tensor, put_


@torch.no_grad()
def constrain_(model: nn.Module) -> None:
    """Projects every fusion matrix onto the constraint set, after each step: projected gradient descent.

    A reparametrisation (e.g. by squares) would keep it nonnegative too, but values at zero would have no gradient.
    """
    for form in _shared_forms(model):
        put_(form.strength, nonnegative_units(full_tensor(form.strength)))


@torch.no_grad()
def turn_(model: nn.Module) -> None:
    """Moves sign and length of every column of the fusion into the query, so that the projection changes least."""
    for form in _shared_forms(model):
        fusion = form.strength
        peak = fusion.gather(0, fusion.abs().argmax(0, keepdim=True))[0]
        factor = torch.where(peak < 0, -1.0, 1.0) * fusion.norm(dim=0)
        form.query.weight.mul_(factor[:, None])
        if form.query.bias is not None:
            form.query.bias.mul_(factor)
        fusion.div_(torch.where(factor == 0, 1.0, factor))


def _shared_forms(model: nn.Module) -> list[SharedForm]:
    forms = [layer.scores for layer in family_of(model).attention(model)]
    found = [form for form in forms if isinstance(form, SharedForm) and form.strength.numel()]
    if not found:
        raise NotSupported(
            "nonnegative_fusion was requested, but no heads of this model share directions; omit it, or realize a "
            "prescription of the rule shared_rank first."
        )
    return found
