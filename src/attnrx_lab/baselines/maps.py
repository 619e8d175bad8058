"""The linear maps of a model, each replaced by two factors."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from attnrx.attention import Attention
from attnrx.attention.head_linear import HeadLinear, OutputProjection
from attnrx.costs import ModelCosts, PartCosts, linear_costs
from attnrx.decompositions import LowRank
from attnrx.errors import InvalidInput, NotSupported, UnknownName
from attnrx.models import LowRankLinear, family_of, rank_of
from attnrx.shapes import Float, Tensor

ATTENTION_MAPS, MLP_MAPS = ("query", "key", "value", "output"), ("fc1", "fc2")
MAPS = (*ATTENTION_MAPS, *MLP_MAPS)

MapAddress = tuple[int, str]
"""A layer, and the name of one of its maps."""

Ranks = Mapping[MapAddress, int]


class FactoredHeads(HeadLinear):
    """A projection to heads as two maps: tokens to `rank` shared features, then to the rows of the heads."""

    joins = False

    def __init__(self, source: HeadLinear, rank: int):
        super().__init__(rank, source.rows, source.bias is not None)
        self.first = nn.Linear(source.weight.shape[1], rank, bias=False)

    def forward(self, tokens: Float[Tensor, "batch tokens width"]) -> Float[Tensor, "batch tokens rows"]:
        return super().forward(self.first(tokens))

    def padded(
        self, tokens: Float[Tensor, "batch tokens width"], rows: tuple[int, ...]
    ) -> Float[Tensor, "batch tokens rows"]:
        """Applies both, the second padded."""
        return self(tokens) if rows == self.rows else super().padded(self.first(tokens), rows)


class FactoredOutputProjection(OutputProjection):
    """An output projection as two maps: the head outputs to `rank` features, then to the width."""

    def __init__(self, source: OutputProjection, rank: int):
        super().__init__(source.reads, rank, bias=False)
        self.second = nn.Linear(rank, source.weight.shape[0], bias=source.bias is not None)

    def forward(self, features: Float[Tensor, "batch tokens features"]) -> Float[Tensor, "batch tokens width"]:
        return self.second(F.linear(features, self.weight))

    def padded(
        self, features: Float[Tensor, "batch tokens features"], reads: tuple[int, ...]
    ) -> Float[Tensor, "batch tokens width"]:
        """Applies both, the first to padded heads."""
        return self(features) if reads == self.reads else self.second(super().padded(features, reads))


# The paths of the first matrix, the second and the bias in each kind of module.
PARAMETERS: Mapping[type[nn.Module], tuple[str, str, str]] = {
    FactoredHeads: ("first.weight", "weight", "bias"),
    FactoredOutputProjection: ("weight", "second.weight", "second.bias"),
    LowRankLinear: ("first.weight", "second.weight", "second.bias"),
}


def map_addresses(model: nn.Module, names: Sequence[str] = MAPS) -> tuple[MapAddress, ...]:
    """Returns the layer and name of every requested map; those of the MLP only if it has two linear maps.

    Raises:
        UnknownName: for a name that is none of MAPS.
        NotSupported: where a map is factored already.
        InvalidInput: where the model has none of them.
    """
    for name in names:
        if name not in MAPS:
            raise UnknownName("linear map", name, MAPS)
    family = family_of(model)
    mlps = family.mlp(model)
    there = [name for name in MAPS if name in names and (name in ATTENTION_MAPS or mlps)]
    if not there:
        raise InvalidInput(f"this model has none of the maps {', '.join(names)}: its MLPs are not two linear maps.")
    found = tuple((layer, name) for layer in range(len(family.attention(model))) for name in there)
    for address in found:
        if not isinstance(linear_at(model, address), HeadLinear | OutputProjection | nn.Linear):
            raise NotSupported(f"{address[1]} of layer {address[0]} is written as two maps already; give the original.")
    return found


def linear_at(model: nn.Module, address: MapAddress) -> nn.Module:
    """Returns the module of one map, which has a weight [outputs, inputs] and a bias or None."""
    layer, name = address
    if name in MLP_MAPS:
        return family_of(model).mlp(model)[layer][MLP_MAPS.index(name)]
    owner, attribute = _owner(family_of(model).attention(model)[layer], name)
    return getattr(owner, attribute)


def weights_at(model: nn.Module, address: MapAddress) -> tuple[Float[Tensor, "outputs inputs"], Tensor | None]:
    """Returns the weight and the bias of one map, in float64 on the CPU."""
    linear = linear_at(model, address)
    bias = linear.bias
    assert isinstance(linear.weight, Tensor)
    weight = linear.weight.detach().cpu().double()
    return weight, bias.detach().cpu().double() if isinstance(bias, Tensor) else None


def with_factors(model: nn.Module, factors: Mapping[MapAddress, LowRank]) -> nn.Module:
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for address, low_rank in factors.items():
            _replace_(changed, address, low_rank)
    return changed


def factored_model_costs(model: nn.Module, ranks: Ranks) -> ModelCosts:
    """Returns the costs of the model with these maps factored; the attention itself costs the same."""
    family = family_of(model)
    mlp = tuple(
        tuple(ranks.get((layer, name), rank_of(linear)) for name, linear in zip(MLP_MAPS, pair, strict=True))
        for layer, pair in enumerate(family.mlp(model))
    )
    costs = family.costs(model, mlp_ranks=tuple((first, second) for first, second in mlp))
    layers = []
    for index, layer in enumerate(costs.layers):
        parts = {name: _map_costs(model, (index, name), layer.tokens, ranks) for name in ATTENTION_MAPS}
        query_key, value_output = parts["query"] + parts["key"], parts["value"] + parts["output"]
        layers.append(replace(layer, query_key=query_key, value_output=value_output))
    return replace(costs, layers=tuple(layers))


def _map_costs(model: nn.Module, address: MapAddress, tokens: int, ranks: Ranks) -> PartCosts:
    linear = linear_at(model, address)
    assert isinstance(linear.weight, Tensor)
    outputs, inputs = linear.weight.shape
    bias, rank = linear.bias is not None, ranks.get(address)
    if rank is None:
        return linear_costs(inputs, outputs, tokens, bias=bias)
    return linear_costs(inputs, rank, tokens, bias=False) + linear_costs(rank, outputs, tokens, bias=bias)


def _owner(attention: Attention, name: str) -> tuple[nn.Module, str]:
    return (attention.scores if name in ("query", "key") else attention), name


def _replace_(model: nn.Module, address: MapAddress, low_rank: LowRank) -> None:
    layer, name = address
    linear: nn.Module = linear_at(model, address)
    assert isinstance(linear.weight, Tensor)
    new = _factored(linear, low_rank.rank).to(linear.weight.device, linear.weight.dtype).train(linear.training)
    first, second, bias = PARAMETERS[type(new)]
    new.get_parameter(first).copy_(low_rank.first)
    new.get_parameter(second).copy_(low_rank.second)
    if low_rank.bias is not None:
        new.get_parameter(bias).copy_(low_rank.bias)
    if name in MLP_MAPS:
        family_of(model).set_mlp_(model, layer, MLP_MAPS.index(name), new)
    else:
        setattr(*_owner(family_of(model).attention(model)[layer], name), new)


def _factored(linear: nn.Module, rank: int) -> FactoredHeads | FactoredOutputProjection | LowRankLinear:
    if isinstance(linear, HeadLinear):
        return FactoredHeads(linear, rank)
    if isinstance(linear, OutputProjection):
        return FactoredOutputProjection(linear, rank)
    assert isinstance(linear, nn.Linear)
    return LowRankLinear(linear.in_features, linear.out_features, rank, linear.bias is not None)
