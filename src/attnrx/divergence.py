"""Measured sensitivity to the rank: KL divergence of a head's attention when only its first directions are kept."""

from dataclasses import replace

import torch
from torch import nn

from attnrx.data import ImageData
from attnrx.diagnosis import Diagnosis, LayerDiagnosis
from attnrx.errors import DataError, FingerprintMismatch
from attnrx.model_data import images_for
from attnrx.models import InputValidation, evaluating, family_of, model_fingerprint, observing, require_all_tokens
from attnrx.observation import Observation
from attnrx.prescription import Basis
from attnrx.rules import rewritten
from attnrx.shapes import Float, Tensor


def measure_divergence(
    model: nn.Module, diagnosis: Diagnosis, images: ImageData, metric: str = "mix", batch_size: int = 8
) -> Diagnosis:
    """Adds the reading divergence_METRIC, [heads, directions + 1], to a diagnosis, in one more pass over the images.

    Column r is the mean over queries of KL(attention || attention with the first r directions in that metric), in nats;
    the last one is zero up to rounding. `TotalRank(by="divergence")` allocates ranks by it.

    Raises:
        FingerprintMismatch: The diagnosis belongs to another model.
        DataError: There are no images, or they do not fit the model.
    """
    require_all_tokens(model, "measure the divergence of")
    if model_fingerprint(model) != diagnosis.fingerprint:
        raise FingerprintMismatch("the diagnosis was made for another model than the one to measure; diagnose it.")
    rewritten_diagnosis, bases = rewritten(diagnosis, metric)
    sums = [torch.zeros(spectrum_shape(layer), dtype=torch.float64) for layer in rewritten_diagnosis.layers]
    num_images = 0

    def observe(index: int, observation: Observation) -> None:
        sums[index] += (
            _divergences(observation, rewritten_diagnosis.layers[index], bases[index]) * observation.query.shape[0]
        )

    shown = images_for(model, images, "images")
    weight, input_validation = next(model.parameters()), InputValidation(model, family_of(model), "measure_divergence")
    with evaluating([model]), observing(model, family_of(model), observe):
        for batch in shown.batches(batch_size, device=weight.device):
            model(input_validation.take(batch.images))
            num_images += len(batch.images)
    input_validation.notes()  # warns about images on another scale
    if not num_images:
        raise DataError("measure_divergence was given no image; give a few, e.g. splits.train.take(24).")
    layers = tuple(
        replace(layer, readings={**layer.readings, f"divergence_{metric}": total / num_images})
        for layer, total in zip(diagnosis.layers, sums, strict=True)
    )
    return replace(diagnosis, layers=layers)


def spectrum_shape(layer: LayerDiagnosis) -> tuple[int, int]:
    """Returns (heads, directions + 1): the possible ranks of a head are 0..directions."""
    heads, directions = layer.spectrum.strength.shape
    return heads, directions + 1


def _divergences(observation: Observation, layer: LayerDiagnosis, basis: Basis) -> Float[Tensor, "heads ranks"]:
    """Returns the divergence at every rank on one batch, adding one direction after the other to the scores."""
    dtype = torch.promote_types(observation.query.dtype, torch.float32)
    left, right = (table.to(observation.query.device, dtype) for table in (basis.left, basis.right))
    strength = layer.spectrum.strength.to(observation.query.device, dtype)
    # [directions, batch, heads, tokens]: the rows of one direction are contiguous.
    query = torch.einsum("bthd,hrd->rbht", observation.query.to(dtype), left)
    query = query * strength.T[:, None, :, None] * observation.scale
    key = torch.einsum("bthd,hrd->rbht", observation.key.to(dtype), right)
    attention = observation.attention.to(dtype)
    negative_entropy = torch.xlogy(attention, attention).sum(-1).mean((0, 2))
    scores = torch.zeros_like(attention)
    divergences = [negative_entropy - (attention * torch.log_softmax(scores, -1)).sum(-1).mean((0, 2))]
    for rows, columns in zip(query, key, strict=True):
        scores.addcmul_(rows[..., None], columns[..., None, :])
        divergences.append(negative_entropy - (attention * torch.log_softmax(scores, -1)).sum(-1).mean((0, 2)))
    return torch.stack(divergences, dim=-1).clamp_min(0).double().cpu()
