"""The losses that train the halting scores of A-ViT (Yin et al., CVPR 2022)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from attnrx.support.arguments import RATE, Kind, number, optional
from attnrx.support.errors import InvalidInput, NotSupported
from attnrx.support.shapes import Float, Tensor
from attnrx.training.losses.loss import Loss, LossContext
from attnrx.vit.models import reduction_of
from attnrx.vit.tokens import HaltingScores, Soft

Scores = Float[Tensor, "batch patches"]


@dataclass(frozen=True)
class Ponder(Loss):
    """A-ViT's ponder loss: the mean over all patches of N + r, the layers that a patch runs through and the remainder.

    A patch halts after the layer N at which its halting scores sum to 1 - `epsilon`, at the stage that prunes it, or
    after the last layer; r is 1 minus the sum of its scores before layer N. Gradients flow through r alone. The
    weight is the paper's.
    """

    reads_features: ClassVar[bool] = True
    kinds: ClassVar[Mapping[str, Kind]] = {"epsilon": RATE}
    epsilon: float = 0.01
    weight: float = 5e-4

    def __call__(self, context: LossContext) -> Float[Tensor, ""]:
        return ponder([*_halting(context)], self.epsilon)


@dataclass(frozen=True)
class HaltingPrior(Loss):
    """The divergence KL(H || target) of the distribution of halting scores over the layers (A-ViT's prior).

    H is the mean halting score of every layer, over the images and the patches that it receives, scaled to a sum of 1;
    the target is a Gaussian around `depth`, with a deviation of one layer. Without a `depth` it is the number of layers
    that a patch runs through on average under the policy. The weight is the paper's.
    """

    reads_features: ClassVar[bool] = True
    kinds: ClassVar[Mapping[str, Kind]] = {"depth": optional(number(1.0, above=False))}
    depth: float | None = None
    weight: float = 0.1

    def __call__(self, context: LossContext) -> Float[Tensor, ""]:
        scores, present = zip(*_halting(context), strict=True)
        if self.depth is not None and self.depth > len(scores):
            raise InvalidInput(
                f"{self}: a patch runs through {len(scores)} layers at most; give such a depth, or None."
            )
        shares = torch.stack([mask.mean() for mask in present])
        means = torch.stack([(score * mask).sum() for score, mask in zip(scores, present, strict=True)])
        means = means / (shares * present[0].numel())  # over the patches that each layer receives: [layers]
        depth = float(shares.sum()) if self.depth is None else self.depth
        layers = torch.arange(1, len(means) + 1, device=means.device, dtype=means.dtype)
        target = (-0.5 * (layers - depth).square()).log_softmax(0)
        # The softmax of logarithms scales H to a sum of 1; the clamp, because a layer may have scores that round to 0.
        log_shares = means.clamp_min(torch.finfo(means.dtype).tiny).log().log_softmax(0)
        return (log_shares.exp() * (log_shares - target)).sum()


def ponder(layers: list[tuple[Scores, Scores]], epsilon: float) -> Float[Tensor, ""]:
    """Returns the mean of N + r from the halting scores of every layer and the mask of the patches that it receives."""
    # [batch, patches] each. At the end `count` is N, `total` the sum of the scores up to layer N, `latest` the score of
    # layer N: r = 1 - (total - latest).
    running = torch.ones_like(layers[0][0])
    count, total, latest = (torch.zeros_like(running) for _ in range(3))
    for scores, present in layers:
        active = running * present
        count = count + active
        latest = torch.where(active > 0, scores, latest)
        total = total + scores * active
        running = running * (total.detach() < 1 - epsilon)  # a comparison has no gradient: only r has one
    return (count + 1 - (total - latest)).mean()


def _halting(context: LossContext) -> Iterator[tuple[Scores, Scores]]:
    """Yields for every layer the halting scores of all patches of the image, and 1 for those that it received."""
    reduction, run = reduction_of(context.model), context.run
    reducer = None if reduction is None else reduction.policy.reducer
    scores_of = reducer.scores if isinstance(reducer, Soft) else reducer
    if reduction is None or not isinstance(scores_of, HaltingScores):
        found = "no token policy" if reduction is None else f"the token policy {reduction.policy}"
        raise NotSupported(
            f"Ponder and HaltingPrior train the halting scores of the token reducer halting_scores, and this model has "
            f"{found}: attach a policy with that reducer, e.g. halting_scores:0.7@4,7,10, or omit the loss."
        )
    if run is None or not run.trail:
        raise NotSupported("Ponder and HaltingPrior need the run of the step in their context (recording_tokens).")
    prefix, patches = reduction.shape.layout.prefix, reduction.shape.layout.patches
    # Scores are returned per patch of the image, because N and r are sums over layers with different tokens.
    for block, tokens in enumerate(context.features):
        scores = scores_of.layer_score(tokens)[:, prefix:]
        stages = sum(layer <= block + 1 for layer in reduction.policy.layers)
        if not stages:
            yield scores, torch.ones_like(scores)
            continue
        # The patches that remained after the last stage before this layer, in the order of its tokens.
        indices = run.trail[stages - 1]
        # Not by their number: the kept patches and a fused token can be as many as all patches.
        if reduction.keeps_places(run, block):
            scores = scores.gather(1, indices.clamp_min(0))
        # One more column collects added tokens (-1), and is cut off.
        target = indices.where(indices >= 0, patches)
        room = scores.new_zeros(len(scores), patches + 1)
        yield (
            room.scatter(1, target, scores)[:, :patches],
            room.scatter(1, target, 1.0)[:, :patches],
        )
