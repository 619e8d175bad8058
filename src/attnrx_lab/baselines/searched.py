"""Baselines that are learned for one target of MACs: the share of a model is its share of the MACs."""

from abc import abstractmethod

from torch import nn

from attnrx.data import ImageSet
from attnrx.support.shapes import ImageBatch, Tensor
from attnrx.vit.costs import ModelCosts
from attnrx.vit.models import family_of
from attnrx_lab.baselines.factoring import ModelCompressor


class SearchedBaseline(ModelCompressor):
    """A method that learns a smaller model for a share of the MACs; every model is made once and kept.

    Other compressors have a share of units, for which costs are known before anything is learned.
    """

    def __init__(self, model: nn.Module, calibration: ImageSet, seed: int = 0):
        self.model, self.calibration, self.seed = model, calibration, seed
        self._models: dict[float, nn.Module] = {}

    @abstractmethod
    def searched(self, share: float) -> nn.Module:
        """Learns and returns a model with at most this share of the MACs, which is below 1."""

    def share_within(self, macs: int) -> float | None:
        share = macs / self._macs  # not by bisection: the costs at a share are known only once a model is learned
        return share if share >= self.least else None

    def costs(self, share: float) -> ModelCosts:
        model = self.make(share)
        return family_of(model).costs(model)

    def make(self, share: float) -> nn.Module:
        if share >= 1:  # nothing to learn
            return self.model
        if share not in self._models:
            self._models[share] = self.searched(share)
        return self._models[share]

    def images_of_step(self, step: int, batch: int) -> ImageBatch:
        """Returns the images of one step; every pass over the images is shuffled by the seed."""
        size = min(batch, len(self.calibration))
        steps = len(self.calibration) // size  # of a pass, which drops its last incomplete batch
        epoch, start = divmod(step, steps)
        weight: Tensor = next(self.model.parameters())
        return next(iter(self.calibration.batches(size, seed=self.seed + epoch, start=start))).images.to(weight)

    @property
    def _macs(self) -> int:
        return family_of(self.model).costs(self.model).macs
