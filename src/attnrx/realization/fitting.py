"""Strengths solved on data: those of the kept directions whose scores come nearest to the original's."""

from dataclasses import replace

import torch
from torch import nn

from attnrx.data import ImageSet
from attnrx.decompositions import StrengthFit
from attnrx.models import Showing, evaluating, family_of, observing
from attnrx.observation import Observation
from attnrx.prescription import LayerPrescription, Prescription
from attnrx.shapes import Float, Tensor


def refitted(model: nn.Module, prescription: Prescription, calibration: ImageSet) -> list[LayerPrescription]:
    """Gives the layers with the kept strengths solved on the calibration images; untouched heads keep theirs, bit for
    bit.
    """
    family = family_of(model)
    attentions = family.attention(model)
    fits = [StrengthFit(*layer.keep.shape) for layer in prescription.layers]

    def observe(index: int, seen: Observation) -> None:
        keep = prescription.layers[index].keep.to(seen.query.device)
        has_norms = attentions[index].spec.norms != "none"
        left, right = _kept_rows(seen.query, keep, has_norms), _kept_rows(seen.key, keep, has_norms)
        strength = seen.strength if seen.strength is not None else torch.ones_like(keep, dtype=seen.query.dtype)
        fits[index].observe(left, right, seen.query, seen.key, strength)

    weight, showing = next(model.parameters()), Showing(model, family, "realize")
    with evaluating([model]), observing(model, family, observe):
        for batch in calibration.batches(64, device=weight.device):
            model(showing.take(batch.images))
    showing.notes()  # warns
    return [_with_fit(layer, fit) for layer, fit in zip(prescription.layers, fits, strict=True)]


def _with_fit(layer: LayerPrescription, fit: StrengthFit) -> LayerPrescription:
    touched = ~layer.keep.all(-1, keepdim=True)
    strength = torch.where(touched & layer.keep, fit.solve(layer.keep).to(layer.strength.dtype), layer.strength)
    return replace(layer, strength=strength)


def _kept_rows(rows: Float[Tensor, "batch tokens heads directions"], keep: Tensor, has_norms: bool) -> Tensor:
    kept = rows * keep.to(rows.dtype)
    return nn.functional.normalize(kept, dim=-1) if has_norms else kept
