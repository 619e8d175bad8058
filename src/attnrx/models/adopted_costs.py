"""The costs of an adopted model in closed form."""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import nn

from attnrx.costs import ModelCosts, PartCosts, layer_costs
from attnrx.errors import InvalidInput
from attnrx.models.adopted import Adopted
from attnrx.models.low_rank_linear import rank_of
from attnrx.models.token_costs import costs_of_tokens
from attnrx.spec import AttentionSpec
from attnrx.tokens import TokenPolicy


def params(module: nn.Module, without: tuple[str, ...] = ()) -> int:
    """Returns the parameters of a module, except those of the submodules `without`."""
    rest = sum(params(module.get_submodule(name)) for name in without)
    return sum(parameter.numel() for parameter in module.parameters()) - rest


def matrices(module: nn.Module) -> int:
    """Returns the entries of all linear maps in a module: its MACs for one token."""
    return sum(linear.weight.numel() for linear in module.modules() if isinstance(linear, nn.Linear))


def norm_features(module: nn.Module) -> int:
    """Returns the features that a norm normalizes for one token; 0 for any other module."""
    return math.prod(getattr(module, "normalized_shape", (0,)))


def mlp_costs(mlp: nn.Module, tokens: int, changes: Iterable[tuple[nn.Module, int | None]] = ()) -> PartCosts:
    """Returns the costs of an MLP, optionally with some of its maps in another rank (None: one matrix)."""
    saved = sum(matrices(linear) - _entries(linear, rank) for linear, rank in changes)
    return PartCosts(params(mlp) - saved, tokens * (matrices(mlp) - saved))


def _entries(linear: nn.Module, rank: int | None) -> int:
    inputs, outputs = int(linear.in_features), int(linear.out_features)  # type: ignore[arg-type]
    return inputs * outputs if rank is None else rank * (inputs + outputs)


Ranks = tuple[tuple[int | None, int | None], ...]


def adopted_costs(
    family: Any,
    adopted: Adopted,
    attention: tuple[AttentionSpec, ...] | None,
    mlp_ranks: Ranks | None,
    tokens: TokenPolicy | None,
) -> ModelCosts:
    """Returns the costs of a model of an `AdoptedFamily`; see `AdoptedFamily.costs`."""
    layers, maps = family.layers(adopted.source), family.mlp(adopted)
    specs = tuple(own.spec for own in family.attention(adopted)) if attention is None else attention
    ranks = mlp_ranks
    if ranks is None:
        ranks = tuple((rank_of(first), rank_of(second)) for first, second in maps)
    if len(specs) != len(layers) or len(ranks) != len(maps):
        raise InvalidInput(
            f"{len(specs)} attention specs and {len(ranks)} pairs of MLP ranks for {len(layers)} layers and "
            f"{len(maps)} MLPs of two maps: give one for each."
        )
    patches = family.patches(adopted.source)
    positions = family.positions(adopted)
    token_costs = costs_of_tokens(adopted, family, tokens, specs, positions + family.prefix_tokens(adopted.source))
    heads = [module for name, module in adopted.source.named_modules() if name in family.head_names]
    classifier = sum(params(module) for module in heads)
    before = params(adopted.source) - classifier - sum(params(layer) for layer in layers)
    changes = [tuple(zip(*pair, strict=True)) for pair in zip(maps, ranks, strict=True)] or [()] * len(layers)
    return ModelCosts(
        patches=PartCosts(before, positions * patches.weight.numel()),
        layers=tuple(
            replace(
                layer_costs(spec, own, 0),
                mlp=mlp_costs(layer.get_submodule("mlp"), own, change),
                layer_norms=PartCosts(params(layer, without=(family.attention_name, "mlp"))),
            )
            for layer, spec, change, own in zip(layers, specs, changes, token_costs.tokens, strict=True)
        ),
        classifier=PartCosts(classifier),
        classifier_macs=sum(matrices(head) for head in heads),
        predictors=token_costs.predictors,
        predictor_norm_features=token_costs.norm_features,
        outer_norm_features=_outer_norm_features(family, adopted.source, positions, token_costs.tokens),
    )


def _outer_norm_features(family: Any, source: nn.Module, positions: int, tokens: tuple[int, ...]) -> int:
    """Returns the features of the norms outside the layers, times the tokens that each of them normalizes."""
    last = family.last_norm(source)
    inside = {module for layer in family.layers(source) for module in layer.modules()}
    total = 0
    for name, module in source.named_modules():
        features = norm_features(module)
        if features and module not in inside:
            num_tokens = tokens[-1] if module is last else tokens[0]
            count = positions if name.startswith("patch_embed.") else num_tokens
            total += features * (1 if name in family.pooled_names else count)
    return total
