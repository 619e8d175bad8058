"""Realizing what is prescribed for the tokens: a policy put between the layers, with its predictors."""

from collections.abc import Mapping

import torch
from torch import nn

from attnrx.errors import InvalidInput
from attnrx.models import Family, TokenReduction, attach_tokens_, reduction_of
from attnrx.prescription import TokenPrescription
from attnrx.shapes import Tensor


def prescribed_tokens(model: nn.Module) -> TokenPrescription:
    """Returns the policy that a model carries as a prescription, with copies of its predictors where they are learned.

    So what was trained in one model can be realized beside other ranks.
    """
    reduction = reduction_of(model)
    if reduction is None:
        raise InvalidInput("no token leaves this model, so there is no policy to take from it.")
    learned = {name: tensor.detach().cpu().clone() for name, tensor in reduction.stages.state_dict().items()}
    return TokenPrescription.of(reduction.policy, learned if reduction.policy.reducer.learned else None)


def realize_tokens_(model: nn.Module, family: Family, tokens: TokenPrescription, by: str, heads: int) -> None:
    """Lets tokens leave the model, in place."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(tokens.seed)
        reduction = attach_tokens_(model, family, tokens.policy, by, heads)
    if tokens.predictors is not None:
        _load_(reduction, tokens.predictors)


def _load_(reduction: TokenReduction, predictors: Mapping[str, Tensor]) -> None:
    wanted = {name: tuple(tensor.shape) for name, tensor in reduction.stages.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in predictors.items()}
    wrong = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    if wrong:
        shape, first = reduction.shape, wrong[0]
        raise InvalidInput(
            f"the predictors of {reduction.policy} were made for another model: this one has width {shape.width} and "
            f"{shape.heads} heads, so {first} is {wanted.get(first, 'not there')}, and the prescription's is "
            f"{found.get(first, 'not there')}. Train predictors for this model, or leave them out for fresh ones."
        )
    reduction.stages.load_state_dict(dict(predictors))
