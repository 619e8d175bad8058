"""The interface of baseline methods, which compress a model to a share of its units or of its MACs."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from torch import nn

from attnrx.change.realization import realize
from attnrx.data import ImageSet
from attnrx.decide.planning.cost_table import prescribed_costs
from attnrx.nouns.diagnosis import Diagnosis
from attnrx.nouns.prescription import LayerPrescription, Prescription
from attnrx.support.errors import NotSupported
from attnrx.support.shapes import ImageBatch, Tensor
from attnrx.vit.costs import ModelCosts
from attnrx.vit.models import family_of

# Shares are multiples of 1 / GRID. This step is smaller than one direction of any layer, and exact in binary.
GRID = 4096


def largest_share(fits: Callable[[float], bool], least: float = 1 / GRID) -> float | None:
    """Returns the largest share in [`least`, 1] for which `fits` is true, or None if it is false for `least`.

    The search is a bisection, so `fits` must be true up to some share and false above it. A limit on costs meets this
    condition, because costs rise with the share.
    """
    # The bisection assumes that `fits` is false for its upper end, so the full share is tested first. It runs on
    # integers (multiples of 1 / GRID), so both ends become exact neighbours.
    if fits(1.0):
        return 1.0
    below = round(least * GRID) - 1  # assumed to fit until a share is found
    low, high = below, GRID
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle / GRID) else (low, middle)
    return low / GRID if low > below else None


class ModelCompressor(ABC):
    """Compresses one model to any share in (0, 1] of its units or MACs. A larger share never costs less."""

    @property
    def least(self) -> float:
        """The smallest share that can be requested."""
        return 1 / GRID

    def share_within(self, macs: int) -> float | None:
        """Returns the largest share that costs at most `macs`, or None if even the smallest share costs more."""
        return largest_share(lambda share: self.costs(share).macs <= macs, self.least)

    @abstractmethod
    def costs(self, share: float) -> ModelCosts:
        """Returns the parameters and MACs at this share."""

    @abstractmethod
    def make(self, share: float) -> nn.Module:
        """Returns the model compressed to this share."""


class PrescribedBaseline(ModelCompressor):
    """A baseline that realizes a prescription, and fits no weights afterwards.

    `diagnosis` contains the moments of the hidden units (`Moments`), measured on the `calibration` images.

    Raises:
        NotSupported: A layer has rotations, biases or norms in its attention scores, or hidden units that cannot be
            removed.
    """

    name: str

    def __init__(self, model: nn.Module, diagnosis: Diagnosis, calibration: ImageSet, seed: int = 0):
        self.model, self.diagnosis, self.calibration, self.seed = model, diagnosis, calibration, seed
        self.attention = family_of(model).attention(model)
        for layer, attention in zip(diagnosis.layers, self.attention, strict=True):
            if not attention.spec.is_plain or layer.hidden is None:
                raise NotSupported(
                    f"the baseline {self.name} needs plain dot products and an MLP of two linear maps in every layer."
                )

    @abstractmethod
    def layers(self, share: float, fitted: bool = True) -> Sequence[LayerPrescription]:
        """Returns every layer's pruning decisions. With `fitted=False`, no remaining weights are adjusted.

        The shapes are the same in both cases.
        """

    def prescription(self, share: float, fitted: bool = True) -> Prescription:
        """Returns the prescription that keeps this share of the units. It contains no rules, because none was used."""
        about = {**self.diagnosis.about, "baseline": self.name}
        return Prescription(tuple(self.layers(share, fitted)), {}, self.diagnosis.fingerprint, about)

    def costs(self, share: float) -> ModelCosts:
        # The search for a share needs the costs at many shares. They depend only on shapes, so nothing is fitted.
        return prescribed_costs(self.model, self.prescription(share, fitted=False))

    def make(self, share: float) -> nn.Module:
        return realize(self.model, self.prescription(share))


class SearchedBaseline(ModelCompressor):
    """A baseline that learns a smaller model for a share of the MACs. Every learned model is cached.

    In this class, `share` is a share of the whole model's MACs. The share for a given number of MACs can therefore be
    computed without learning a model.
    """

    def __init__(self, model: nn.Module, calibration: ImageSet, seed: int = 0):
        self.model, self.calibration, self.seed = model, calibration, seed
        self._models: dict[float, nn.Module] = {}

    @abstractmethod
    def searched(self, share: float) -> nn.Module:
        """Learns and returns a model with at most this share of the MACs. `share` is below 1."""

    def share_within(self, macs: int) -> float | None:
        share = macs / self._macs  # no bisection, because it would learn a model at every step
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
        """Returns the images of one training step. The seed determines the order of the images in each epoch."""
        size = min(batch, len(self.calibration))
        steps = len(self.calibration) // size  # in one pass, without an incomplete last batch
        epoch, start = divmod(step, steps)
        weight: Tensor = next(self.model.parameters())
        return next(iter(self.calibration.batches(size, seed=self.seed + epoch, start=start))).images.to(weight)

    @property
    def _macs(self) -> int:
        return family_of(self.model).costs(self.model).macs
