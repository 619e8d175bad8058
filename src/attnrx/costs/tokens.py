"""The costs of a token policy: the tokens of every layer, and the predictors."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from attnrx.costs.model_costs import PartCosts
from attnrx.spec import AttentionSpec
from attnrx.tokens import Shape, TokenPolicy

NOTHING = PartCosts()


@dataclass(frozen=True)
class TokenCosts:
    """The tokens of every layer, and the costs of the predictors and of their norms."""

    tokens: tuple[int, ...]
    predictors: PartCosts = NOTHING
    norm_features: int = 0


def token_costs(policy: TokenPolicy, shape: Shape, specs: Sequence[AttentionSpec], by: str = "compress") -> TokenCosts:
    """Returns the costs of a policy in a model with these layers, before anything is built.

    Masked, all tokens stay in place, and every predictor runs on all of them. A stage that prunes nothing runs no
    predictor, but its predictor exists. Parameters are counted on the predictor itself.

    Raises:
        InvalidInput, NotSupported: The policy does not fit the model.
    """
    layout, patches, depth = shape.layout, shape.layout.patches, len(specs)
    policy = policy.on(layout, depth)
    masked = by == "mask"
    stage_patches = (patches,) * len(policy.layers) if masked else policy.state(layout)
    stages = zip(policy.layers, stage_patches, policy.counts(patches), strict=True)
    at_work = [(layer, own, count) for layer, own, count in stages if count < patches]
    shown = {layer: max((*specs[layer - 2].ranks, 1)) for layer in policy.layers}
    deciding = sum(
        policy.reducer.predictor_macs(replace(shape, directions=shown[layer]), own, count)
        for layer, own, count in at_work
    )
    with torch.device("meta"):
        predictor = policy.reducer.predictor(shape)
    numbers = sum(parameter.numel() for parameter in predictor.parameters())
    return TokenCosts(
        tokens=(layout.tokens,) * depth if masked else policy.tokens(layout, depth),
        predictors=PartCosts((1 if policy.reducer.one_predictor else len(policy.layers)) * numbers, deciding),
        norm_features=sum(own for _, own, _ in at_work) * _norm_features(predictor),
    )


def _norm_features(predictor: nn.Module) -> int:
    """Features that the norms of a predictor divide for one patch."""
    norms = [module for module in predictor.modules() if isinstance(module, nn.LayerNorm)]
    return sum(math.prod(norm.normalized_shape) for norm in norms)
