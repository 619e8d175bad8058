"""A panel of diagnostics that observe the same pass."""

from dataclasses import replace

import torch

from attnrx.decide.diagnostics.diagnostic import Diagnostic
from attnrx.decide.diagnostics.perturbation import PerturbationResponse
from attnrx.support.errors import InvalidInput
from attnrx.support.shapes import Tensor
from attnrx.vit.observation import Observation
from attnrx.vit.spectrum import Spectrum

PER_IMAGE = ("query", "key", "scores", "attention", "value", "output")  # the fields of an observation with a batch axis


class Panel:
    """The accumulators of all diagnostics, for layers with these spectra.

    `perturbation` is the diagnostic that needs paired batches, if there is one; there can be only one, because two
    would return readings of the same name.
    """

    def __init__(self, diagnostics: tuple[Diagnostic, ...], spectra: tuple[Spectrum, ...]):
        kinds = [type(diagnostic) for diagnostic in diagnostics]
        twice = sorted({kind.__name__ for kind in kinds if kinds.count(kind) > 1})
        if not diagnostics or twice:
            problem = f"{', '.join(twice)} given twice" if twice else "no diagnostic given"
            raise InvalidInput(f"a diagnosis with {problem}: choose at least one, and each kind once.")
        # At most one, because every kind is given once.
        paired = [each for each in diagnostics if isinstance(each, PerturbationResponse)]
        self.perturbation = paired[0] if paired else None
        self._paired = [each.start(spectra) for each in paired]
        self._plain = [each.start(spectra) for each in diagnostics if each is not self.perturbation]
        for layer, spectrum in enumerate(spectra):
            if not spectrum.heads:  # it computes nothing to observe, and its readings are empty
                self.observe_pairs(layer, _nothing(spectrum))

    def to_perturb(self, images: int) -> int:
        return 0 if self.perturbation is None else self.perturbation.count(images)

    def observe(self, layer: int, observation: Observation) -> None:
        """Adds the intermediate results of one layer for one batch.

        Raises:
            InvalidInput: The layer computed NaN or infinity.
        """
        _require_finite(layer, observation)
        for accumulator in self._plain:
            accumulator.observe(layer, observation)

    def observe_pairs(self, layer: int, observation: Observation) -> None:
        """Adds a batch whose second half are the images of the first half, perturbed."""
        half = len(observation.query) // 2
        first = {name: getattr(observation, name)[:half] for name in PER_IMAGE}
        # The other diagnostics receive every image once, unperturbed.
        self.observe(layer, replace(observation, **first))
        for accumulator in self._paired:
            accumulator.observe(layer, observation)

    def readings(self) -> list[dict[str, Tensor]]:
        """Returns the readings of all diagnostics, one dictionary per layer.

        Raises:
            InvalidInput: A reading overflowed.
        """
        by_accumulator = [accumulator.readings() for accumulator in (*self._plain, *self._paired)]
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


def _nothing(spectrum: Spectrum) -> Observation:
    """Returns the empty observation of a layer without heads, for a pair of images of one token."""
    rows = torch.zeros(2, 1, 0, spectrum.strength.shape[1])
    maps, values = torch.zeros(2, 0, 1, 1), torch.zeros(2, 0, 1, 1)
    strength, readout = torch.zeros(0, rows.shape[-1]), torch.zeros(0, 1, 1)
    return Observation(rows, rows, strength, spectrum.scale, maps, maps, values, values, readout)
