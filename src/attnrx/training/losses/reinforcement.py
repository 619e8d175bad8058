"""Policy-gradient training of the predictors of learned token reducers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from attnrx.support.arguments import NOT_NEGATIVE, Kind, one_of
from attnrx.support.shapes import Bool, Float, Tensor
from attnrx.training.losses.loss import Loss, LossContext, sampling_run
from attnrx.vit.models import evaluating
from attnrx.vit.tokens.reducer import KeepDrop, PerPatch


@dataclass(frozen=True)
class PolicyGradient(Loss):
    """REINFORCE (Williams, 1992): minus the log-probability of the sampled keeps and drops times their advantage.

    With this loss the sampled masks carry no gradient of the other losses to the predictors, except of `KeepRatio`. The
    reward of a stage is 1 - u^2 where the answer is right and -`penalty` where it is wrong; u is the share of the
    image's patches that the stage keeps. The value is a mean over images, stages and the remaining patches.

    `credit="stage"`, `baseline="greedy"` are those of IA-RED2 (Pan et al., NeurIPS 2021): all patches of a stage share
    its reward, the baseline is the reward of the same image under the selection of inference (self-critical
    training), and the stages begin to learn one after another, at equal parts of the run. There the backbone and the
    predictors are trained in turns, and the predictor is an attention of its own; here both learn at every step, and
    any predictor can be used.

    `credit="patch"`, `baseline="mean"` follow RL4EViT (Lu et al., 2025), a Markov game with one agent for every patch
    (multi-agent PPO): an agent is rewarded for the right answer, with all others, and for its own saving, against them:
    1 for a drop and -1 for a keep, times `saving`. The baseline is the mean over the agents of the batch, in place of a
    learned critic; a sample is used for one step, in which the clipping of PPO has no effect. The paper's rewards were
    not available: these are this package's.
    """

    reinforces: ClassVar[bool] = True
    reads_labels: ClassVar[bool] = True
    kinds: ClassVar[Mapping[str, Kind]] = {
        "credit": one_of("stage", "patch"),
        "baseline": one_of("greedy", "mean"),
        "penalty": NOT_NEGATIVE,
        "saving": NOT_NEGATIVE,
    }
    credit: str = "stage"
    baseline: str = "greedy"
    penalty: float = 1.0
    saving: float = 0.1
    weight: float = 1.0

    def __call__(self, context: LossContext) -> Float[Tensor, ""]:
        reduction, run = sampling_run(self, context)
        sampled, scores = [keep.detach() for keep in run.sampled], run.keep_scores
        right = context.logits.argmax(-1) == context.labels
        rewards = self._rewards(right, sampled)
        if self.baseline == "greedy":
            # At inference every image keeps the policy's share, so a constant mask gives the saving of the baseline.
            keep = [torch.full_like(sampled[0], share) for share in reduction.sampled_shares(run)]
            with torch.no_grad(), evaluating((context.model,)):
                answers = context.model.forward(context.images).argmax(-1)
            baselines = self._rewards(answers == context.labels, keep)
        else:
            baselines = [reward.mean() for reward in rewards]
        advantages = [reward - baseline for reward, baseline in zip(rewards, baselines, strict=True)]
        learning = len(sampled)  # the number of stages that learn, from the first
        if self.credit == "stage":
            learning = min(1 + int(context.progress * len(sampled)), len(sampled))
        return reinforced(scores[:learning], sampled, advantages)

    def _rewards(self, right: Bool[Tensor, "images"], sampled: Sequence[PerPatch]) -> list[Float[Tensor, "images _"]]:
        """Returns the reward of every image, or of every patch of it, at every stage."""
        rewards = []
        for keep in sampled:
            if self.credit == "patch":
                answer = torch.where(right, 1.0, -self.penalty).to(keep.dtype)
                rewards.append(answer[:, None] + self.saving * (1 - 2 * keep))
            else:
                saved = 1 - keep.mean(1).square()
                rewards.append(torch.where(right, saved, -self.penalty)[:, None])  # [images, 1]: shared by all patches
        return rewards


def reinforced(
    scores: Sequence[KeepDrop], sampled: Sequence[PerPatch], advantages: Sequence[Float[Tensor, "images _"]]
) -> Float[Tensor, ""]:
    """Returns minus the mean log-probability of the decisions about the remaining patches, times their advantage."""
    terms, there = [], torch.ones_like(sampled[0])
    # Not strict: only the first stages have scores that learn.
    for log_probabilities, keep, advantage in zip(scores, sampled, advantages, strict=False):
        log_probability = torch.where(keep > 0, log_probabilities[..., 0], log_probabilities[..., 1])
        # A stage decides about the patches that the stage before it kept; there is always one (`sampled_keep`).
        terms.append(-(log_probability * advantage * there).sum(1) / there.sum(1))
        there = keep
    return torch.stack(terms).mean()
