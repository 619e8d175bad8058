"""Baselines that select units of attention and MLP, and whose result is an ordinary prescription."""

from abc import abstractmethod
from collections.abc import Sequence

from torch import nn

from attnrx.change.realization import realize
from attnrx.data import ImageSet
from attnrx.decide.planning.cost_table import prescribed_costs
from attnrx.nouns.diagnosis import Diagnosis
from attnrx.nouns.prescription import LayerPrescription, Prescription
from attnrx.support.errors import NotSupported
from attnrx.vit.costs import ModelCosts
from attnrx.vit.models import family_of
from attnrx_lab.baselines.factoring import ModelCompressor


class PrescribedBaseline(ModelCompressor):
    """A method whose smaller model is the realization of a prescription, without further fits.

    `diagnosis` has the moments of the hidden units (`Moments`), measured on the `calibration` images.

    Raises:
        NotSupported: A layer has rotations, biases or norms in its scores, or hidden units that cannot be removed.
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
        """Returns the decisions about every layer; with `fitted=False` of the same shapes, without compensation."""

    def prescription(self, share: float, fitted: bool = True) -> Prescription:
        """Returns the prescription at a share of the units; it has no rules, because no rule of attnrx made it."""
        about = {**self.diagnosis.about, "baseline": self.name}
        return Prescription(tuple(self.layers(share, fitted)), {}, self.diagnosis.fingerprint, about)

    def costs(self, share: float) -> ModelCosts:
        # Costs depend on shapes alone, and the search for a share needs them at many: no compensation is solved here.
        return prescribed_costs(self.model, self.prescription(share, fitted=False))

    def make(self, share: float) -> nn.Module:
        return realize(self.model, self.prescription(share))
