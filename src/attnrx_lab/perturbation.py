"""SVDA's perturbation response (how much attention changes after small changes to the image), and two SVDA losses."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import nn

from attnrx.data import ImageData
from attnrx.data.model_data import images_for
from attnrx.decide.diagnostics import effective_rank
from attnrx.nouns.diagnosis import Diagnosis
from attnrx.support.arguments import COUNT, POSITIVE, Kind, checked, number
from attnrx.support.errors import InvalidInput, NotSupported
from attnrx.support.modules import evaluating
from attnrx.support.progress import track
from attnrx.support.shapes import Float, Tensor
from attnrx.training.losses import LOSSES, Loss, LossContext
from attnrx.vit.attention import Observation
from attnrx.vit.models import (
    InputValidation,
    TokenReduction,
    family_of,
    model_fingerprint,
    observing,
    reduction_of,
    require_all_tokens,
)
from attnrx.vit.models.boundary.verbs import verb
from attnrx_lab.svda_attention import SvdaForm


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
    """Adds the reading perturbation_response [heads] to a diagnosis.

    For each head, the reading is the mean over images of ||A(x) - A(x + delta)||_F (SVDA, Eq. 33), where A(x) is the
    attention map for image x. The function runs the model once on at most `most` images and their perturbed copies.

    Args:
        model: The model whose attention is measured. It must keep all tokens.
        diagnosis: The model's diagnosis.
        images: Images, normalized for the model.
        size: The standard deviation of the Gaussian noise delta, in the units of the normalized images.
        most: The largest number of images to perturb.
        batch_size: Clean images per forward pass, which also contains their perturbed copies.
        seed: The seed of the noise.

    Returns:
        The diagnosis with the added reading in every layer.

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
        # The perturbed images follow the clean images in the batch, so one forward pass computes both maps.
        sums[index] += response(*observation.attention.chunk(2)).sum(0).double().cpu()

    validation, first = InputValidation(model, family, "measure_perturbation"), 0
    with evaluating([model]), observing(model, family, observe):
        batches = shown.batches(batch_size, device=next(model.parameters()).device)
        for batch in track(batches, "perturbing", -(-len(shown) // batch_size)):
            pixels = validation.take(batch.images)
            model(torch.cat([pixels, pixels + size * noise_like(pixels, first, seed)]))
            first += len(pixels)
    validation.notes()  # called only for its warning
    layers = (
        replace(layer, readings={**layer.readings, "perturbation_response": total / first})
        for layer, total in zip(diagnosis.layers, sums, strict=True)
    )
    return replace(diagnosis, layers=tuple(layers))


def response(
    clean: Float[Tensor, "batch heads queries keys"], perturbed: Float[Tensor, "batch heads queries keys"]
) -> Float[Tensor, "batch heads"]:
    """Returns the Frobenius norm of the change in every attention map (SVDA, Eq. 33)."""
    return torch.linalg.vector_norm(perturbed - clean, dim=(-2, -1))


def noise_like(
    images: Float[Tensor, "batch channels height width"], first: int, seed: int
) -> Float[Tensor, "batch channels height width"]:
    """Returns standard normal noise that depends only on the seed and the images' indices, not on the batch size."""
    generator = torch.Generator()
    draws = []
    for index in range(first, first + len(images)):
        # A seed sequence mixes both numbers, so neighbouring seeds and images have unrelated noise.
        state = np.random.SeedSequence((seed, index)).generate_state(1, np.uint64)
        generator.manual_seed(int(state[0]))
        draws.append(torch.randn(images.shape[1:], generator=generator, dtype=images.dtype))
    return torch.stack(draws).to(images.device)


@dataclass(frozen=True)
class TargetRank(Loss):
    """The squared difference between a head's effective rank and `rank` (SVDA, Eq. 28), averaged over all heads.

    Only the strengths receive gradients. Heads without directions have no effective rank, so the loss skips them.
    `layers` restricts the loss to some layers, e.g. to layers that a diagnosis singled out. Layers are counted from 1.
    If `layers` is empty, the loss applies to all layers.
    """

    kinds: ClassVar[Mapping[str, Kind]] = {"rank": number(1.0, above=False)}
    rank: float
    weight: float = 0.01
    layers: tuple[int, ...] = ()

    def __call__(self, context: LossContext) -> Float[Tensor, ""]:
        layers = family_of(context.model).attention(context.model)
        indices = _chosen(self, self.layers, len(layers))
        ranks = [
            effective_rank(strength)
            for index, layer in enumerate(layers)
            if index in indices and isinstance(layer.scores, SvdaForm)
            for strength in layer.scores.strength.split(layer.spec.ranks)  # one vector for all heads
            if strength.numel()
        ]
        if not ranks:
            raise NotSupported("TargetRank needs learned strengths, and this model has none: train an SVDA model.")
        return (torch.stack(ranks) - self.rank).square().mean()


@dataclass(frozen=True)
class PerturbationRobustness(Loss):
    """The squared Frobenius norm of the change in attention maps when the images get Gaussian noise (SVDA, Eq. 34).

    The loss is averaged over images, heads and layers. `layers` restricts the loss to some layers, e.g. to layers that
    a diagnosis singled out. Layers are counted from 1. `scale` is the standard deviation of the noise, in the units of
    the normalized images. The loss runs an extra forward pass with eager attention on the images and their noisy
    copies, so a training step takes about three times as long. If a token policy removes patches, all `layers` must
    come before the policy's first stage. After this stage, an image and its noisy copy may keep different patches.
    """

    scale: float = 0.05
    weight: float = 1.0
    layers: tuple[int, ...] = ()

    def __call__(self, context: LossContext) -> Float[Tensor, ""]:
        changes: list[Tensor] = []
        family = family_of(context.model)
        indices = _chosen(self, self.layers, len(family.attention(context.model)))
        reduction = reduction_of(context.model)
        if reduction is not None and reduction.policy.drops and max(indices) + 1 >= (first := first_layer(reduction)):
            before = "/".join(map(str, range(1, first)))
            raise NotSupported(
                f"{self}: from layer {first} on, {reduction.policy} gives an image and its noisy copy "
                f"different patches, whose maps cannot be compared; give layers before it, at most layers={before}."
            )

        def observe(layer: int, observation: Observation) -> None:
            if layer not in indices:
                return
            # The clean images are the first half of the batch. Each half is [images, heads, queries, keys].
            clean, noisy = observation.attention.chunk(2)
            changes.append((clean - noisy).square().sum((-2, -1)).mean())

        # One pass computes both halves, so each layer's hook sees the clean and the noisy maps at the same time.
        images = torch.cat([context.images, context.images + self.scale * step_noise(context)])
        with observing(context.model, family, observe):
            context.model.forward(images)  # `forward` of the bare module, where the hooks see every layer
        if not changes:
            raise NotSupported("PerturbationRobustness needs attention maps, and every head of this model was removed.")
        return torch.stack(changes).mean()


def step_noise(context: LossContext) -> Float[Tensor, "batch channels height width"]:
    """Returns standard normal noise for the images that this process uses in a training step.

    Each process draws the noise for all processes, but uses only its own part. So N processes use the same noise as one
    process with the same global batch size. A repeated step gets the same noise again.
    """
    (process, processes), count = context.shard, len(context.images)
    # Noise is drawn on the CPU, because device generators draw other numbers for the same seed.
    generator = torch.Generator().manual_seed(context.seed)
    shape = count * processes, *context.images.shape[1:]
    noise = torch.randn(shape, generator=generator, dtype=context.images.dtype)
    return noise[count * process : count * (process + 1)].to(context.images.device)


def first_layer(reduction: TokenReduction) -> int:
    """Returns the first layer (counted from 1) before which patches are pruned."""
    patches = reduction.shape.layout.patches
    return next(
        layer
        for layer, count in zip(reduction.policy.layers, reduction.policy.counts(patches), strict=True)
        if count < patches
    )


def _chosen(loss: Loss, layers: tuple[int, ...], depth: int) -> set[int]:
    """Returns the indices of the layers, or of all layers if none are given. Raises InvalidInput for unknown layers."""
    unknown = [layer for layer in layers if not 1 <= layer <= depth]
    if unknown:
        raise InvalidInput(f"{loss}: the model has the layers 1 to {depth}, and no layer {unknown[0]}.")
    return {layer - 1 for layer in layers} or set(range(depth))


LOSSES.register(TargetRank)
LOSSES.register(PerturbationRobustness)
