"""Perturbation response: the change of attention under a small change of the images."""

from dataclasses import replace

import numpy as np
import torch
from torch import nn

from attnrx.data import ImageData
from attnrx.data.model_data import images_for
from attnrx.nouns.diagnosis import Diagnosis
from attnrx.support.arguments import COUNT, POSITIVE, checked
from attnrx.support.progress import track
from attnrx.support.shapes import Float, Tensor
from attnrx.vit.models import InputValidation, evaluating, family_of, model_fingerprint, observing, require_all_tokens
from attnrx.vit.models.verbs import verb
from attnrx.vit.observation import Observation


@checked(size=POSITIVE, most=COUNT)
@verb
def measure_perturbation(
    model: nn.Module,
    diagnosis: Diagnosis,
    images: ImageData,
    size: float = 0.1,
    most: int = 256,
    batch_size: int = 32,
    seed: int = 0,
) -> Diagnosis:
    """Adds the reading perturbation_response [heads] to a diagnosis: the mean over images of ||A(x) - A(x + delta)||_F
    (SVDA, Eq. 33), in one pass over the first images and their perturbed copies.

    Args:
        model: The model.
        diagnosis: Its diagnosis.
        images: Images, normalized for the model.
        size: The standard deviation of the Gaussian noise delta, in the units of the normalized images.
        most: At most so many images are perturbed.
        batch_size: Images per forward pass, with as many perturbed ones.
        seed: Seeds the noise.

    Returns:
        The diagnosis with the reading.

    Raises:
        FingerprintMismatch: The diagnosis belongs to another model.
        DataError: The images do not fit the model.
    """
    require_all_tokens(model, "measure the perturbation response of")
    diagnosis.require(model_fingerprint(model), "the model to measure")
    family, shown = family_of(model), images_for(model, images, "images", limit=most)
    shown = shown.take(min(most, len(shown)))
    sums = [torch.zeros(len(layer.spectrum.heads), dtype=torch.float64) for layer in diagnosis.layers]

    def observe(index: int, observation: Observation) -> None:
        # The perturbed images follow the clean ones in one batch, so that both maps are of the same forward pass.
        sums[index] += response(*observation.attention.chunk(2)).sum(0).double().cpu()

    validation, first = InputValidation(model, family, "measure_perturbation"), 0
    with evaluating([model]), observing(model, family, observe):
        batches = shown.batches(batch_size, device=next(model.parameters()).device)
        for batch in track(batches, "perturbing", -(-len(shown) // batch_size)):
            pixels = validation.take(batch.images)
            model(torch.cat([pixels, pixels + size * noise_like(pixels, first, seed)]))
            first += len(pixels)
    validation.notes()  # called for its warning
    layers = (
        replace(layer, readings={**layer.readings, "perturbation_response": total / first})
        for layer, total in zip(diagnosis.layers, sums, strict=True)
    )
    return replace(diagnosis, layers=tuple(layers))


def response(
    clean: Float[Tensor, "batch heads queries keys"], perturbed: Float[Tensor, "batch heads queries keys"]
) -> Float[Tensor, "batch heads"]:
    """Returns the Frobenius norm of the change of every attention map (SVDA, Eq. 33)."""
    return torch.linalg.vector_norm(perturbed - clean, dim=(-2, -1))


def noise_like(
    images: Float[Tensor, "batch channels height width"], first: int, seed: int
) -> Float[Tensor, "batch channels height width"]:
    """Returns standard normal noise that depends on the seed and each image's index only, not on batches or devices."""
    generator = torch.Generator()
    draws = []
    for number in range(first, first + len(images)):
        # A seed sequence mixes both numbers, so that neighbouring seeds and images have unrelated noise.
        state = np.random.SeedSequence((seed, number)).generate_state(1, np.uint64)
        generator.manual_seed(int(state[0]))
        draws.append(torch.randn(images.shape[1:], generator=generator, dtype=images.dtype))
    return torch.stack(draws).to(images.device)
