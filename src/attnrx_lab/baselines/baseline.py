"""The base class of model compressors: exact costs and the model at any share."""

from abc import ABC, abstractmethod

from torch import nn

from attnrx.costs import ModelCosts
from attnrx.planning.budget import GRID


class ModelCompressor(ABC):
    """A way of compressing one model to any share in (0, 1]; larger shares never cost less."""

    @property
    def least(self) -> float:
        """The smallest share that can be requested."""
        return 1 / GRID

    @abstractmethod
    def costs(self, share: float) -> ModelCosts:
        """Parameters and MACs at this share."""

    @abstractmethod
    def make(self, share: float) -> nn.Module:
        """The model at this share."""
