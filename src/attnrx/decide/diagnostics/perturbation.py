"""Perturbation response: the change of attention under a small change of the images."""

from dataclasses import dataclass

import numpy as np
import torch

from attnrx.decide.diagnostics.diagnostic import Accumulator, Averages, Diagnostic
from attnrx.support.arguments import COUNT, POSITIVE, optional, require_fields
from attnrx.support.shapes import Float, Tensor
from attnrx.vit.observation import Observation
from attnrx.vit.spectrum import Spectrum

SHARE, MOST = 8, 256  # by default one image in eight is perturbed: the pass stays within 1.6 plain forward passes


@dataclass(frozen=True)
class PerturbationResponse(Diagnostic):
    """Returns perturbation_response [heads]: the mean over images of ||A(x) - A(x + delta)||_F (SVDA, Eq. 33).

    The perturbation delta is Gaussian noise of standard deviation `size`, in the units of the normalized images. Only
    the first `images` images are perturbed, since each costs a second forward pass; by default, an eighth of all, at
    most 256. Its accumulator needs paired batches: images, then the same images perturbed.
    """

    size: float = 0.1
    images: int | None = None

    def __post_init__(self):
        require_fields(self, size=POSITIVE, images=optional(COUNT))

    def start(self, spectra: tuple[Spectrum, ...]) -> Accumulator:
        return Averages(len(spectra), self.measure)

    def count(self, available: int) -> int:
        return min(available, MOST, -(-available // SHARE)) if self.images is None else min(available, self.images)

    def measure(self, observation: Observation) -> dict[str, Tensor]:
        # The perturbed images follow the clean ones in one batch, so that both maps are of the same forward pass.
        clean, perturbed = observation.attention.chunk(2)
        return {"perturbation_response": response(clean, perturbed).mean(0)}

    def perturb(
        self, images: Float[Tensor, "batch channels height width"], first: int, seed: int
    ) -> Float[Tensor, "batch channels height width"]:
        """Returns the perturbed images, the first of which is image number `first` of the data."""
        return images + self.size * noise_like(images, first, seed)


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
