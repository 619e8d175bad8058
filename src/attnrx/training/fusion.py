"""The constraint on the fusion matrix in training: nothing negative, columns of length one (IrrAtt, Eq. 7)."""

import torch
from torch import nn

from attnrx.attention.forms import SharedForm
from attnrx.decompositions import nonnegative_units
from attnrx.errors import NotSupported
from attnrx.models import family_of
from attnrx.training.sharding import put_, whole


@torch.no_grad()
def constrain_(model: nn.Module) -> None:
    """Moves every fusion matrix to the nearest one that is allowed; after each step: a projected gradient method.

    A reparametrisation (squares, say) would keep it nonnegative too, but could not bring a value back from zero.
    """
    for form in _shared_forms(model):
        put_(form.strength, nonnegative_units(whole(form.strength)))


@torch.no_grad()
def turn_(model: nn.Module) -> None:
    """Returns sign and length of every column of the fusion to the query, so that the constraint loses least."""
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
            "nonnegative_fusion was requested for, but no heads of this model share directions; leave it out, or "
            "realize a prescription of the rule shared_rank first."
        )
    return found
