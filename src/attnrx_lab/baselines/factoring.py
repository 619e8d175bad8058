"""Baselines that factor every linear map: SVD, ASVD, FWSVD and SVD-LLM."""

from collections.abc import Callable, Mapping, Sequence
from math import floor

from torch import nn

from attnrx.costs import ModelCosts
from attnrx.decompositions import LowRank, asvd, break_even_rank, fwsvd, plain_svd, svd_llm
from attnrx.shapes import Tensor
from attnrx_lab.baselines.baseline import ModelCompressor
from attnrx_lab.baselines.maps import (
    MAPS,
    MapAddress,
    factored_model_costs,
    linear_at,
    map_addresses,
    weights_at,
    with_factors,
)
from attnrx_lab.baselines.statistics import MapStatistics

Factor = Callable[[nn.Module, MapAddress, MapStatistics], LowRank]


def _svd(model: nn.Module, address: MapAddress, data: MapStatistics) -> LowRank:
    return plain_svd(*weights_at(model, address))


def _asvd(model: nn.Module, address: MapAddress, data: MapStatistics) -> LowRank:
    return asvd(*weights_at(model, address), data.moments(address).magnitude)


def _fwsvd(model: nn.Module, address: MapAddress, data: MapStatistics, side: str = "inputs") -> LowRank:
    return fwsvd(*weights_at(model, address), data.fisher(address), side=side)


def _fwsvd_outputs(model: nn.Module, address: MapAddress, data: MapStatistics) -> LowRank:
    return _fwsvd(model, address, data, "outputs")


def _svd_llm(model: nn.Module, address: MapAddress, data: MapStatistics) -> LowRank:
    return svd_llm(*weights_at(model, address), data.moments(address).moment)


# svd: nearest in the Frobenius norm. asvd: inputs scaled by the root of their mean magnitude; without its search for
# the rank of every layer. fwsvd: weighted by the Fisher information of each input's weights, as printed for x W;
# fwsvd_outputs: of each output's. svd_llm: whitened inputs, without its updates of the layers that follow.
FACTORS: Mapping[str, Factor] = {
    "svd": _svd,
    "asvd": _asvd,
    "fwsvd": _fwsvd,
    "fwsvd_outputs": _fwsvd_outputs,
    "svd_llm": _svd_llm,
}


class FactoringBaseline(ModelCompressor):
    """Factors all linear maps, or the named ones, each at the same share of its own MACs.

    A share s means rank floor(s * outputs * inputs / (outputs + inputs)), at least 1, which is how these papers set a
    compression ratio. The attention itself is unchanged: these methods do not distinguish heads.
    """

    def __init__(self, model: nn.Module, kind: str, names: Sequence[str], statistics: MapStatistics):
        self.model, self.factor, self.statistics = model, FACTORS[kind], statistics
        self.map_addresses = map_addresses(model, names or MAPS)
        self._whole: dict[MapAddress, LowRank] = {}

    def costs(self, share: float) -> ModelCosts:
        return factored_model_costs(self.model, self.ranks(share))

    def make(self, share: float) -> nn.Module:
        ranks = self.ranks(share)
        return with_factors(self.model, {address: self._at(address).truncated(rank) for address, rank in ranks.items()})

    def ranks(self, share: float) -> dict[MapAddress, int]:
        found = {}
        for address in self.map_addresses:
            weight = linear_at(self.model, address).weight
            assert isinstance(weight, Tensor)
            found[address] = max(1, floor(share * break_even_rank(*weight.shape)))
        return found

    def _at(self, address: MapAddress) -> LowRank:
        if address not in self._whole:
            self._whole[address] = self.factor(self.model, address, self.statistics)
        return self._whole[address]
