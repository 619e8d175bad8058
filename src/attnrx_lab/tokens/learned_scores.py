"""Token reducers that learn which patches to keep: how they sample in training, their predictors, and DynamicViT."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from attnrx.support.shapes import Float, Tensor
from attnrx.vit.tokens import SampledTokens, Selecting, Shape, TokenState
from attnrx.vit.tokens.reducer import PerPatch

KeepDrop = Float[Tensor, "batch patches 2"]  # the log-probabilities of keep and drop of every patch


class Predicting(Selecting):
    """A learned selecting reducer. Its predictor returns every patch's log-probabilities of keep and drop."""

    learned = True

    def relevance(self, state: TokenState, predictor: nn.Module) -> PerPatch:
        """Returns each patch's log-odds of being kept, which rank like log-probabilities but do not round to 0."""
        # The log-probabilities of several almost certain patches round to 0. Then the index would decide their order.
        return odds(self.keep_scores(state, predictor))

    def keep_scores(self, state: TokenState, predictor: nn.Module) -> KeepDrop:
        """Returns every patch's log-probabilities of keep and drop, which training uses."""
        return predictor(state)

    def weights(self, relevance: PerPatch) -> PerPatch:
        """Returns the probability that each patch is kept."""
        return relevance.sigmoid()

    def sample(self, state: TokenState, predictor: nn.Module) -> SampledTokens:
        return SampledTokens(self.sampled_mask(state, predictor)[0], state.patches)

    def sampled_mask(
        self, state: TokenState, predictor: nn.Module, prunes_one: bool = False
    ) -> tuple[PerPatch, KeepDrop]:
        """Returns a mask sampled from the scores (`sampled_keep`), and the scores."""
        scores = self.keep_scores(state, predictor)
        return sampled_keep(scores, state.sizes[:, state.prefix :], prunes_one), scores


def odds(scores: KeepDrop) -> PerPatch:
    """Returns each patch's log-odds of being kept, from the log-probabilities of keep and drop."""
    return scores[..., 0] - scores[..., 1]


def sampled_keep(scores: KeepDrop, present_mask: PerPatch, prunes_one: bool = False) -> PerPatch:
    """Samples 1 (keep) or 0 (prune) for every patch by the straight-through Gumbel-softmax of its scores.

    Patches that an earlier stage pruned stay pruned. If the sample would prune all patches of an image, the patch with
    the highest score is kept, because a mean over no patches would be NaN. With `prunes_one`, at least one patch is
    pruned: if the sample would keep all patches, the patch with the lowest score is pruned. Reducers that overwrite a
    pruned patch with a new token need this option.
    """
    # In half precision the Gumbel noise can be infinite.
    sample = nn.functional.gumbel_softmax(scores.float(), hard=True, dim=-1)[..., 0]
    keep = sample.to(present_mask.dtype) * present_mask
    highest = scores[..., 0].detach().masked_fill(present_mask == 0, float("-inf")).argmax(1, keepdim=True)
    keeps_none = (keep.detach().sum(1, keepdim=True) == 0).to(keep.dtype)
    # Corrections are added, not assigned, so that the sample keeps its straight-through gradient.
    keep = keep + torch.zeros_like(keep).scatter(1, highest, keeps_none)
    if not prunes_one:
        return keep
    lowest = scores[..., 0].detach().masked_fill(present_mask == 0, float("inf")).argmin(1, keepdim=True)
    keeps_all = ((keep.detach() > 0).sum(1, keepdim=True) == (present_mask > 0).sum(1, keepdim=True)).to(keep.dtype)
    return keep - torch.zeros_like(keep).scatter(1, lowest, keeps_all)


class TokenFeatures(nn.Module):
    """Projects tokens to features. Half of them are local, and half are averaged over the patches that remain."""

    def __init__(self, width: int, projected: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, projected)

    def forward(
        self, patches: Float[Tensor, "batch patches width"], present_mask: PerPatch
    ) -> Float[Tensor, "batch patches projected"]:
        features = nn.functional.gelu(self.project(self.norm(patches)))
        pooled_width = features.shape[-1] // 2
        # If the number of features is odd, one more feature is local. So a single feature is local.
        local, pooled = features.split([features.shape[-1] - pooled_width, pooled_width], dim=-1)
        # Masked patches stay in place, so the mean counts only the remaining patches: [batch, 1, pooled].
        mean = (pooled * present_mask[..., None]).sum(1, keepdim=True) / present_mask.sum(1)[:, None, None]
        return torch.cat([local, mean.expand_as(pooled)], dim=-1)


class KeepScores(nn.Sequential):
    """An MLP of three linear layers, which computes the log-probabilities of keep and drop from features."""

    def __init__(self, features: int):
        super().__init__(
            nn.Linear(features, features // 2),
            nn.GELU(),
            nn.Linear(features // 2, features // 4),
            nn.GELU(),
            nn.Linear(features // 4, 2),
            # The Gumbel-softmax and the policy gradient need log-probabilities.
            nn.LogSoftmax(dim=-1),
        )

    @staticmethod
    def macs(features: int, patches: int) -> int:
        half, quarter = features // 2, features // 4
        return patches * (features * half + half * quarter + quarter * 2)


class DynamicViTPredictor(nn.Module):
    """Predicts log-probabilities of keep and drop from local and global token features."""

    def __init__(self, width: int):
        super().__init__()
        self.features = TokenFeatures(width, width)
        self.scores = KeepScores(width)

    def forward(self, state: TokenState) -> KeepDrop:
        return self.scores(self.features(state.patches, state.present_mask))


@dataclass(frozen=True)
class DynamicViT(Predicting):
    """Keeps the patches that a learned predictor selects by local and global token features (Rao et al., 2021).

    In training, the gradient with respect to the mask of a dropped patch differs from the paper's gradient. The masked
    softmax (`sized_softmax`) clamps the score of a dropped key to the largest score of the kept keys. The clamp bounds
    the gradient and does not change the output.
    """

    name: ClassVar[str] = "dynamicvit"

    def predictor(self, shape: Shape) -> nn.Module:
        return DynamicViTPredictor(shape.width)

    def predictor_macs(self, shape: Shape, patches: int, count: int) -> int:
        return patches * shape.width**2 + KeepScores.macs(shape.width, patches)
