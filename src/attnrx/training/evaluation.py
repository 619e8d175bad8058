"""The numbers of an epoch: accuracy and loss on a split, and the indicators of every head on the same images."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn

from attnrx.data import ImageSet
from attnrx.decide.diagnostics.geometry import alignment, selectivity
from attnrx.decide.diagnostics.perturbation import noise_like, response
from attnrx.decide.diagnostics.spectral_shape import effective_rank, energy, entropy, sparsity
from attnrx.support.shapes import Bool, Float, Tensor
from attnrx.training.sharding import gathered_weights
from attnrx.training.step import Learner
from attnrx.vit.models import family_of, observing
from attnrx.vit.observation import Observation

Readings = dict[str, list[float]]

IMAGES = 32  # of the probe, which runs after every epoch
NOISE = 0.1  # standard deviation of the perturbation, on the model's input scale
RETAINED = 0.9  # the energy that `retained_rank` directions hold


@torch.no_grad()
def evaluate(learner: Learner, images: ImageSet | None) -> tuple[float, float] | tuple[None, None]:
    """Returns the accuracy and the cross-entropy on all images, which the processes share, possibly unequally.

    Both are None without images, for a split without labels.
    """
    if images is None:
        return None, None
    accelerator, model = learner.accelerator, learner.model
    sums = torch.zeros(3, dtype=torch.float64, device=accelerator.device)
    model.eval()
    with gathered_weights(model):
        for batch in images.batches(learner.config.batch_size, device=accelerator.device, shard=learner.shard):
            with learner.autocast():
                logits = model(batch.images.to(learner.dtype))
            losses = F.cross_entropy(
                logits.to(torch.promote_types(logits.dtype, torch.float32)), batch.labels, reduction="sum"
            )
            num_correct = (logits.argmax(-1) == batch.labels).sum()
            # Sums, not means, because the last batch of a process may be smaller, or missing.
            sums += torch.stack([num_correct, losses, torch.tensor(len(batch)).to(losses)])
    correct, loss, count = learner.summed(sums).tolist()
    return correct / count, loss / count


class Probe:
    """A fixed batch and its noisy copy, on which the model is run in evaluation mode."""

    def __init__(self, images: ImageSet, device: torch.device):
        count = min(IMAGES, len(images))
        clean = next(images.take(count).batches(count)).images
        # The seed is fixed, so that the curves over the epochs show changes of the model and not of the noise.
        self._pairs = torch.cat([clean, clean + NOISE * noise_like(clean, first=0, seed=0)]).to(device)

    @torch.no_grad()
    def read(self, model: nn.Module) -> list[Readings]:
        """Returns the indicators of every layer, each a list with one number per head."""
        with gathered_weights(model):
            family, was_training = family_of(model), model.training
            spectra = [layer.spectrum() if layer.spec.has_norms else None for layer in family.attention(model)]
            readings = [{} if spectrum is None else _spectral(spectrum.strength, spectrum.used) for spectrum in spectra]

            def observe(index: int, observation: Observation) -> None:
                readings[index] |= _geometric(observation)

            model.eval()
            with observing(model, family, observe):
                model.forward(self._pairs.to(next(model.parameters()).dtype))
            model.train(was_training)
            return readings


def _spectral(strength: Float[Tensor, "heads directions"], used: Bool[Tensor, "heads directions"]) -> Readings:
    """Returns the indicators of the strengths; `retained_rank` counts the directions that hold 90 % of the energy."""
    # The strongest first; a direction counts if those before it hold less than RETAINED.
    shares = energy(strength, used).sort(dim=-1, descending=True).values
    readings: Mapping[str, Tensor] = {
        "entropy": entropy(strength, used),
        "effective_rank": effective_rank(strength, used),
        "sparsity": sparsity(strength, used),
        "max_strength": strength.abs().amax(-1),
        "retained_rank": ((shares.cumsum(-1) - shares < RETAINED) & (shares > 0)).sum(-1).double(),
    }
    return {name: reading.tolist() for name, reading in readings.items()}


def _geometric(observation: Observation) -> Readings:
    """Returns the indicators of the attention on the clean images, and its change under noise."""
    clean, noisy = observation.attention.chunk(2)
    readings = {
        "alignment": alignment(observation.query.chunk(2)[0], observation.key.chunk(2)[0]),
        "selectivity": selectivity(clean),
        "perturbation_response": response(clean, noisy).mean(0),
    }
    return {name: reading.tolist() for name, reading in readings.items()}
