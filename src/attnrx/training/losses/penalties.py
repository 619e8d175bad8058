"""Penalties on the attention, the strengths and the tokens of the model in training."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from attnrx.change.decompositions import ownership_penalty
from attnrx.decide.diagnostics.spectral_shape import effective_rank
from attnrx.support.arguments import POSITIVE, Kind, number
from attnrx.support.errors import InvalidInput, NotSupported
from attnrx.support.shapes import Float, Tensor
from attnrx.training.losses.loss import Loss, LossContext, sampling_run
from attnrx.vit.attention.forms import SharedForm, SvdaForm
from attnrx.vit.models import family_of, observing, reduction_of
from attnrx.vit.observation import Observation


@dataclass(frozen=True)
class TargetRank(Loss):
    """The squared distance of a head's effective rank to `rank` (SVDA, Eq. 28), averaged over the heads of all layers.

    Only the strengths receive gradients. Heads without directions have no effective rank and are skipped. `layers` are
    the layers that a diagnosis singled out, the first is 1; none are all.
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
    """The squared Frobenius change of the attention maps under Gaussian noise (SVDA, Eq. 34).

    Averaged over images, heads and layers: all, or those that a diagnosis singled out (`layers`, the first is 1).
    `scale` is the standard deviation of the noise in normalized units. Images and noisy images pass once more, through
    the eager attention, so a step costs about three times as much. With a token policy the layers must lie before its
    first stage, because after it an image and its noisy copy may have different patches.
    """

    kinds: ClassVar[Mapping[str, Kind]] = {"scale": POSITIVE}
    scale: float = 0.05
    weight: float = 1.0
    layers: tuple[int, ...] = ()

    def __call__(self, context: LossContext) -> Float[Tensor, ""]:
        changes: list[Tensor] = []
        family = family_of(context.model)
        indices = _chosen(self, self.layers, len(family.attention(context.model)))
        reduction = reduction_of(context.model)
        if reduction is not None and reduction.policy.drops and max(indices) + 1 >= reduction.first_layer:
            before = "/".join(map(str, range(1, reduction.first_layer)))
            raise NotSupported(
                f"{self}: from layer {reduction.first_layer} on, {reduction.policy} gives an image and its noisy copy "
                f"different patches, whose maps cannot be compared; give layers before it, at most layers={before}."
            )

        def observe(layer: int, observation: Observation) -> None:
            if layer not in indices:
                return
            # The clean images are the first half of the batch: [images, heads, queries, keys] each.
            clean, noisy = observation.attention.chunk(2)
            changes.append((clean - noisy).square().sum((-2, -1)).mean())

        # One pass of both halves, so that each layer's hook has the clean and the noisy maps at the same time.
        images = torch.cat([context.images, context.images + self.scale * context.noise()])
        with observing(context.model, family, observe):
            context.model.forward(images)  # the bare module, in which the hooks see every layer
        if not changes:
            raise NotSupported("PerturbationRobustness needs attention maps, and every head of this model was removed.")
        return torch.stack(changes).mean()


def _chosen(loss: Loss, layers: tuple[int, ...], depth: int) -> set[int]:
    """Returns the indices of the chosen layers, of all if there are none; raises InvalidInput for unknown ones."""
    unknown = [layer for layer in layers if not 1 <= layer <= depth]
    if unknown:
        raise InvalidInput(f"{loss}: the model has the layers 1 to {depth}, and no layer {unknown[0]}.")
    return {layer - 1 for layer in layers} or set(range(depth))


@dataclass(frozen=True)
class FusionOwnership(Loss):
    """The distance of the shared directions from having one head each: the constraint S S^T = I (IrrAtt, Eq. 7), as a
    penalty.

    (sum of |s|)^2 / (sum of s^2) - 1 over the heads, averaged over the directions of all layers: 0 if and only if
    every direction is used by one head, heads - 1 if all use it alike. Its share of the weight grows linearly from 0
    to 1 over the run, so that heads first learn what they need. With `nonnegative_fusion` the other half of the
    constraint, S >= 0, holds as well; `fusion_owner` then cuts the model into irregular heads.
    """

    weight: float = 1.0

    def __call__(self, context: LossContext) -> Float[Tensor, ""]:
        layers = family_of(context.model).attention(context.model)
        forms = [layer.scores for layer in layers if isinstance(layer.scores, SharedForm)]
        fusions = [form.strength for form in forms if form.strength.numel()]
        if not fusions:
            raise NotSupported(
                "FusionOwnership needs shared directions with a strength for each, and this model has none: realize a "
                "prescription of the rule shared_rank with form=cp or form=epc first."
            )
        # A mean over all directions, not over layers: layers may share different numbers of them.
        total = torch.stack([ownership_penalty(fusion) for fusion in fusions]).sum()
        return context.progress * total / sum(fusion.shape[1] for fusion in fusions)


@dataclass(frozen=True)
class KeepRatio(Loss):
    """The squared distance of the share of kept patches from the policy's, over images and stages (SPOT, Eq. 12)."""

    weight: float = 2.0

    def __call__(self, context: LossContext) -> Float[Tensor, ""]:
        reduction, run = sampling_run(self, context)
        # Masked tokens stay in place, so a mean over all patches is the share of the image's patches: [images, stages].
        shares = torch.stack([keep.mean(1) for keep in run.sampled], dim=1)
        return (shares - shares.new_tensor(reduction.sampled_shares(run))).square().mean()
