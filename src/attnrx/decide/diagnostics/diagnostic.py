"""The base class of diagnostics: options that start an accumulator, which observes layers and returns readings."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch

from attnrx.support.arguments import require_fields
from attnrx.support.shapes import Float, Tensor
from attnrx.vit.observation import Observation
from attnrx.vit.spectrum import Spectrum


class Accumulator(ABC):
    """The state of one diagnostic; its size does not depend on the number of images."""

    @abstractmethod
    def observe(self, layer: int, observation: Observation) -> None:
        """Adds the intermediate results of one layer for one batch."""

    @abstractmethod
    def readings(self) -> list[dict[str, Tensor]]:
        """Returns the named readings of every layer, the first axis of each being the head, in float64 on the CPU."""


class Diagnostic(ABC):
    """One family of readings; every diagnostic is a final frozen dataclass whose fields are its options.

    Diagnostics receive spectra and observations, never a model. Two laws hold for all: permuting the heads permutes the
    readings, and observing images in any batches equals observing them at once.
    """

    def __post_init__(self):
        require_fields(self)

    @abstractmethod
    def start(self, spectra: tuple[Spectrum, ...]) -> Accumulator:
        """Returns an accumulator for the layers with these spectra."""


class Averages(Accumulator):
    """Averages over images of the readings that `measure` returns; sums are float64, on its device."""

    def __init__(self, layers: int, measure: Callable[[Observation], Mapping[str, Tensor]]):
        self.measure = measure
        self.images = [0] * layers
        self.sums: list[dict[str, Tensor]] = [{} for _ in range(layers)]

    def observe(self, layer: int, observation: Observation) -> None:
        """Adds one batch; `measure` returns its mean over the images of the batch."""
        images = observation.query.shape[0]
        self.images[layer] += images
        sums = self.sums[layer]
        for name, mean in self.measure(observation).items():
            # Sums, because the mean of the means of batches of unequal sizes is not the mean over the images.
            total = mean.to(torch.float64) * images
            sums[name] = sums[name] + total if name in sums else total

    def readings(self) -> list[dict[str, Tensor]]:
        return [
            # Only here on the CPU: a copy in every batch would wait for the GPU.
            {name: (total / images).cpu() for name, total in sums.items()}
            for sums, images in zip(self.sums, self.images, strict=True)
        ]


class CentredMoment:
    """The sum over rows of (x - mean) (x - mean)^T, of rows that arrive in batches.

    Every batch is centred on its own mean before it is multiplied, in its own precision; batches are merged in float64.
    The sum of x x^T minus the mean's share would lose small variations of large rows to rounding.
    """

    def __init__(self):
        self.rows = 0
        # Numbers without axes, which broadcast: the first rows set device and width.
        self.mean = torch.zeros(())
        self.value = torch.zeros(())

    def covariance(self) -> Float[Tensor, "features features"]:
        """Returns the moment per row, symmetric, in float64 on the CPU; zero without rows."""
        covariance = self.value.cpu().double() / max(self.rows, 1)
        return (covariance + covariance.mT) / 2  # rounding leaves it slightly asymmetric

    def add(self, rows: Float[Tensor, "rows features"]) -> None:
        count = rows.shape[0]
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        mean = rows.mean(0)
        centred = rows - mean
        step = mean.double() - self.mean.to(mean.device)
        # The pairwise update of a centred second moment: the spread between the means of both parts.
        between = self.rows * count / (self.rows + count) * torch.outer(step, step)
        self.value = self.value.to(mean.device) + (centred.T @ centred).double() + between
        self.mean = self.mean.to(mean.device) + step * (count / (self.rows + count))
        self.rows += count
