"""The base class of diagnostics: options that start an accumulator, which observes layers and returns readings."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch

from attnrx.support.arguments import require_fields
from attnrx.support.shapes import Tensor
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
