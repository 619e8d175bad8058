"""A panel of diagnostics that observe the same pass."""

import torch

from attnrx.decide.diagnostics.diagnostic import Diagnostic
from attnrx.support.errors import InvalidInput
from attnrx.support.shapes import Tensor
from attnrx.vit.observation import Observation
from attnrx.vit.spectrum import Spectrum


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
