"""Diagnostics: options that start an accumulator, which observes layers and returns readings; and panels of them."""

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch

from attnrx.support.arguments import require_fields
from attnrx.support.errors import InvalidInput
from attnrx.support.shapes import Float, Tensor
from attnrx.vit.attention import Observation
from attnrx.vit.spectrum import Spectrum


class Accumulator:
    """The readings of one diagnostic for every layer: those of the spectra, and averages over images of what `measure`
    returns; its size does not depend on the number of images.
    """

    def __init__(
        self, of_spectra: Sequence[Mapping[str, Tensor]], measure: Callable[[Observation], Mapping[str, Tensor]]
    ):
        self.of_spectra, self.measure = of_spectra, measure
        self.images = [0] * len(of_spectra)
        self.sums: list[dict[str, Tensor]] = [{} for _ in of_spectra]  # float64, on the device of what is measured

    def observe(self, layer: int, observation: Observation) -> None:
        """Adds the intermediate results of one layer for one batch."""
        images = observation.query.shape[0]
        self.images[layer] += images
        sums = self.sums[layer]
        for name, mean in self.measure(observation).items():
            # Sums, because the mean of the means of batches of unequal sizes is not the mean over the images.
            total = mean.to(torch.float64) * images
            sums[name] = sums[name] + total if name in sums else total

    def readings(self) -> list[dict[str, Tensor]]:
        """Returns the named readings of every layer, the first axis of each being the head, in float64 on the CPU."""
        return [
            # Only here on the CPU: a copy in every batch would wait for the GPU.
            {**of_spectrum, **{name: (total / images).cpu() for name, total in sums.items()}}
            for of_spectrum, sums, images in zip(self.of_spectra, self.sums, self.images, strict=True)
        ]


class Diagnostic:
    """One family of readings; every diagnostic is a final frozen dataclass whose fields are its options.

    Diagnostics receive spectra and observations, never a model. Two laws hold for all: permuting the heads permutes the
    readings, and observing images in any batches equals observing them at once. Readings that are no averages over
    images have an `accumulator` of their own.
    """

    accumulator: ClassVar[type[Accumulator]] = Accumulator

    def __post_init__(self):
        require_fields(self)

    def of_spectrum(self, spectrum: Spectrum) -> dict[str, Tensor]:
        """Returns the readings that do not depend on images, by default none."""
        return {}

    def measure(self, observation: Observation) -> dict[str, Tensor]:
        """Returns the readings of one layer for one batch, each the mean over its images; by default none."""
        return {}

    def start(self, spectra: tuple[Spectrum, ...]) -> Accumulator:
        """Returns an accumulator for the layers with these spectra."""
        return self.accumulator([self.of_spectrum(spectrum) for spectrum in spectra], self.measure)


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


class Panel:
    """The accumulators of all diagnostics, for layers with these spectra."""

    def __init__(self, diagnostics: tuple[Diagnostic, ...], spectra: tuple[Spectrum, ...]):
        kinds = [type(diagnostic) for diagnostic in diagnostics]
        twice = sorted({kind.__name__ for kind in kinds if kinds.count(kind) > 1})
        if not diagnostics or twice:
            problem = f"{', '.join(twice)} given twice" if twice else "no diagnostic given"
            raise InvalidInput(f"a diagnosis with {problem}: choose at least one, and each kind once.")
        self._accumulators = [each.start(spectra) for each in diagnostics]
        for layer, spectrum in enumerate(spectra):
            if not spectrum.heads:  # it computes nothing to observe, and its readings are empty
                # The observation of one image of one token.
                rows, maps = torch.zeros(1, 1, 0, spectrum.strength.shape[1]), torch.zeros(1, 0, 1, 1)
                factors = rows, rows, rows[0, 0], spectrum.scale
                self.observe(layer, Observation(*factors, maps, maps, maps, maps, maps[0]))

    def observe(self, layer: int, observation: Observation) -> None:
        """Adds the intermediate results of one layer for one batch.

        Raises:
            InvalidInput: The layer computed NaN or infinity.
        """
        _require_finite(layer, observation)
        for accumulator in self._accumulators:
            accumulator.observe(layer, observation)

    def readings(self) -> list[dict[str, Tensor]]:
        """Returns the readings of all diagnostics, one dictionary per layer.

        Raises:
            InvalidInput: A reading overflowed.
        """
        by_accumulator = [accumulator.readings() for accumulator in self._accumulators]
        merged = [
            {name: value for part in layer for name, value in part.items()}
            for layer in zip(*by_accumulator, strict=True)
        ]
        for layer, name, value in ((layer, *item) for layer, named in enumerate(merged) for item in named.items()):
            if not bool(torch.isfinite(value).all()):
                raise InvalidInput(
                    f"the reading {name} of layer {layer} overflowed, though the layer's outputs are finite: its "
                    "squares left the range of the model's precision. Diagnose the model in float64, model.double()."
                )
        return merged


def _require_finite(layer: int, observation: Observation) -> None:
    # One sum that is not finite if any value of the layer's attention is not, at a tenth of the cost of isfinite.
    total = observation.output.sum(dtype=torch.promote_types(observation.output.dtype, torch.float32))
    if not bool(torch.isfinite(total)):
        raise InvalidInput(
            f"layer {layer} computed NaN or infinity, though the weights are finite: the images hold NaN, or "
            "the numbers left the range of their precision. Check the data, or diagnose the model in float32."
        )
