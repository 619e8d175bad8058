"""The price of every rank, measured: how far a head's attention moves when only its first directions stay."""

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
    """Adds the reading divergence_METRIC, [heads, directions + 1], to a diagnosis of the model, in one more pass.

    Column r is the mean over queries of KL(attention || attention with the first r directions in that metric), in nats;
    the last one is zero to rounding. `TotalRank(by="divergence")` shares ranks out by it.

    Raises:
        FingerprintMismatch: for a diagnosis of another model.
        DataError: without images, or for images that the model cannot read.
    """
    require_all_tokens(model, "measure the divergence of")
    if model_fingerprint(model) != diagnosis.fingerprint:
        raise FingerprintMismatch("the diagnosis was made for another model than the one to measure; diagnose it.")
    rewritten_diagnosis, bases = rewritten(diagnosis, metric)
    sums = [torch.zeros(spectrum_shape(layer), dtype=torch.float64) for layer in rewritten_diagnosis.layers]
    seen = 0

    def observe(index: int, observation: Observation) -> None:
        sums[index] += (
            _divergences(observation, rewritten_diagnosis.layers[index], bases[index]) * observation.query.shape[0]
        )

    shown = images_for(model, images, "images")
    weight, input_validation = next(model.parameters()), InputValidation(model, family_of(model), "measure_divergence")
    with evaluating([model]), observing(model, family_of(model), observe):
        for batch in shown.batches(batch_size, device=weight.device):
            model(input_validation.take(batch.images))
            seen += len(batch.images)
    input_validation.notes()  # warns
    if not seen:
        raise DataError("measure_divergence was given no image; give a few, e.g. splits.train.take(24).")
    layers = tuple(
        replace(layer, readings={**layer.readings, f"divergence_{metric}": total / seen})
        for layer, total in zip(diagnosis.layers, sums, strict=True)
    )
    return replace(diagnosis, layers=layers)


def spectrum_shape(layer: LayerDiagnosis) -> tuple[int, int]:
    """Heads, and ranks that each may have."""
    heads, directions = layer.spectrum.strength.shape
    return heads, directions + 1


def _divergences(seen: Observation, layer: LayerDiagnosis, basis: Basis) -> Float[Tensor, "heads ranks"]:
    """Returns the divergence at every rank on one batch, adding one direction after the other to the scores."""
    wide = torch.promote_types(seen.query.dtype, torch.float32)
    left, right = (table.to(seen.query.device, wide) for table in (basis.left, basis.right))
    strength = layer.spectrum.strength.to(seen.query.device, wide)
    # [directions, batch, heads, tokens]: the rows of one direction lie together.
    query = torch.einsum("bthd,hrd->rbht", seen.query.to(wide), left) * strength.T[:, None, :, None] * seen.scale
    key = torch.einsum("bthd,hrd->rbht", seen.key.to(wide), right)
    attention = seen.attention.to(wide)
    own = torch.xlogy(attention, attention).sum(-1).mean((0, 2))
    scores = torch.zeros_like(attention)
    found = [own - (attention * torch.log_softmax(scores, -1)).sum(-1).mean((0, 2))]
    for rows, columns in zip(query, key, strict=True):
        scores.addcmul_(rows[..., None], columns[..., None, :])
        found.append(own - (attention * torch.log_softmax(scores, -1)).sum(-1).mean((0, 2)))
    return torch.stack(found, dim=-1).clamp_min(0).double().cpu()
