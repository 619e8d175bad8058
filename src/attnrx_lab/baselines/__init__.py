"""Peers: published ways of compressing a model, each applied as its paper does, to be compared with."""

from collections.abc import Sequence

from torch import nn

from attnrx.data import ImageSet
from attnrx.errors import InvalidInput, UnknownName
from attnrx_lab.baselines.factoring import FACTORS, FactoringPeer
from attnrx_lab.baselines.maker import Maker
from attnrx_lab.baselines.maps import MAPS, factored_model_costs, places, with_factors
from attnrx_lab.baselines.statistics import InputMoments, MapStatistics
from attnrx_lab.baselines.torch_pruning import TorchPruningPeer

TORCH_PRUNING = "torch_pruning"
PEERS = (*FACTORS, TORCH_PRUNING)

__all__ = [
    "FACTORS",
    "MAPS",
    "PEERS",
    "FactoringPeer",
    "InputMoments",
    "Maker",
    "MapStatistics",
    "TorchPruningPeer",
    "factored_model_costs",
    "make_peer",
    "places",
    "require_peer",
    "with_factors",
]


def require_peer(name: str, maps: Sequence[str]) -> None:
    """Refuses a peer that is none of PEERS, maps that are none of MAPS, and maps for a peer that takes none."""
    if name not in PEERS:
        raise UnknownName("peer", name, PEERS)
    for own in maps:
        if own not in MAPS:
            raise UnknownName("linear map", own, MAPS)
    if maps and name == TORCH_PRUNING:
        raise InvalidInput("torch_pruning prunes heads and MLPs together; leave maps= out.")


def make_peer(
    model: nn.Module, name: str, maps: Sequence[str], calibration: ImageSet, statistics: MapStatistics
) -> Maker:
    """Gives the peer of that name for a model, calibrated on these images or on the statistics of them."""
    require_peer(name, maps)
    if name == TORCH_PRUNING:
        return TorchPruningPeer(model, calibration)
    return FactoringPeer(model, name, maps, statistics)
