"""Realizes the token policy of a prescription, with its predictors."""

from collections.abc import Mapping

import torch
from torch import nn

from attnrx.nouns.prescription import TokenPrescription
from attnrx.support.errors import InvalidInput
from attnrx.support.shapes import Tensor
from attnrx.vit.models import Family, TokenReduction, attach_tokens_, reduction_of


def prescribed_tokens(model: nn.Module) -> TokenPrescription:
    """Returns the policy attached to a model as a prescription, with copies of its predictors where they are learned.

    Predictors trained in one model can thus be realized together with other ranks.

    Raises:
        InvalidInput: The model prunes and merges no tokens.
    """
    reduction = reduction_of(model)
    if reduction is None:
        raise InvalidInput("this model prunes and merges no tokens, so it has no policy to return.")
    learned = {name: tensor.detach().cpu().clone() for name, tensor in reduction.stages.state_dict().items()}
    return TokenPrescription.of(reduction.policy, learned if reduction.policy.reducer.learned else None)


def realize_tokens_(model: nn.Module, family: Family, tokens: TokenPrescription, by: str, heads: int) -> None:
    """Attaches the prescribed token policy to the model, in place.

    Raises:
        InvalidInput: The predictors were made for another model.
    """
    # Fresh predictors depend on the seed of the prescription only, and the random numbers of the caller do not change.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(tokens.seed)
        reduction = attach_tokens_(model, family, tokens.policy, by, heads)
    if tokens.predictors is not None:
        _load_(reduction, tokens.predictors)


def _load_(reduction: TokenReduction, predictors: Mapping[str, Tensor]) -> None:
    expected = {name: tuple(tensor.shape) for name, tensor in reduction.stages.state_dict().items()}
    loaded = {name: tuple(tensor.shape) for name, tensor in predictors.items()}
    wrong = sorted(name for name in expected.keys() | loaded.keys() if expected.get(name) != loaded.get(name))
    if wrong:
        shape, first = reduction.shape, wrong[0]
        raise InvalidInput(
            f"the predictors of {reduction.policy} were made for another model: this one has width {shape.width} and "
            f"{shape.heads} heads, so {first} is {expected.get(first, 'absent')}, and the prescription's is "
            f"{loaded.get(first, 'absent')}. Train predictors for this model, or omit them for fresh ones."
        )
    reduction.stages.load_state_dict(dict(predictors))
