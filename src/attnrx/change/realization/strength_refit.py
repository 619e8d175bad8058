"""Refits strengths on calibration data by least squares, so that the attention approximates the original's."""

from dataclasses import replace

import torch
from torch import nn

from attnrx.change.decompositions import StrengthFit
from attnrx.change.predictions import observe_images
from attnrx.data import ImageSet
from attnrx.nouns.prescription import LayerPrescription, Prescription
from attnrx.support.shapes import Float, Tensor
from attnrx.vit.models import family_of
from attnrx.vit.observation import Observation


def refit_strengths(model: nn.Module, prescription: Prescription, calibration: ImageSet) -> list[LayerPrescription]:
    """Returns the layers with the kept strengths refitted on the calibration images; unchanged heads stay
    bit-identical.
    """
    attentions = family_of(model).attention(model)
    fits = [StrengthFit(*layer.qk.keep.shape) for layer in prescription.layers]

    def observe(index: int, observation: Observation) -> None:
        # The rows as the compressed layer will compute them: pruned directions zero, and divided by the norm of the
        # rest.
        keep = prescription.layers[index].qk.keep.to(observation.query.device)
        has_norms = attentions[index].spec.has_norms
        left, right = _kept_rows(observation.query, keep, has_norms), _kept_rows(observation.key, keep, has_norms)
        fits[index].observe(left, right, observation.scores, observation.scale)

    observe_images(model, calibration, observe, "realize", "fitting strengths")
    layers = []
    for layer, fit in zip(prescription.layers, fits, strict=True):
        keep, strength = layer.qk.keep, layer.qk.strength
        # A head that keeps all of its directions is exact already, and a refit would only add rounding.
        changed = keep & ~keep.all(-1, keepdim=True)
        solved = fit.solve(keep, strength).to(strength.dtype)
        layers.append(layer.with_scores(replace(layer.qk, strength=torch.where(changed, solved, strength))))
    return layers


def _kept_rows(rows: Float[Tensor, "batch tokens heads directions"], keep: Tensor, has_norms: bool) -> Tensor:
    masked = rows * keep.to(rows.dtype)
    # The observed rows are divided by their norms already; dividing again by the norm of the kept part is the same.
    return nn.functional.normalize(masked, dim=-1) if has_norms else masked
