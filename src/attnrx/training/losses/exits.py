"""Multi-exit training: the class token answers after early layers too."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F

from attnrx.support.arguments import Kind, number
from attnrx.support.errors import NotSupported
from attnrx.support.shapes import Float, Tensor
from attnrx.training.losses.loss import Loss, LossContext, Task
from attnrx.vit.models import family_of, reduction_of


@dataclass(frozen=True)
class MultiExit(Loss):
    """The loss of the class token as an answer before every stage that prunes tokens (METR: Liu et al., 2024).

    Class attention of early layers is a poor score, because their class token has no task yet; exits give it one. The
    value is a mean over the exits of the cross-entropy against the labels, and of KL(final || exit) with the share
    `distilled`: the answer of the whole model, without gradient, teaches the exits. METR adds a classifier for every
    exit; here the exits share the norm and the classifier of the model, and no weight is added. Prune with `evit` or
    `class_attention`. METR's weights of the terms were not available: these are this package's.
    """

    reads_labels: ClassVar[bool] = True
    reads_features: ClassVar[bool] = True
    kinds: ClassVar[Mapping[str, Kind]] = {"distilled": number(0.0, 1.0, above=False)}
    distilled: float = 0.5
    weight: float = 1.0

    def __call__(self, context: LossContext) -> Float[Tensor, ""]:
        model, family = context.model, family_of(context.model)
        reduction, layout = reduction_of(model), family.token_layout(model)
        # A classifier of pooled patches was never trained to read a class token.
        if reduction is None or not layout.class_token or layout.pooled != "class" or not family.heads(model):
            raise NotSupported(
                "MultiExit needs a token policy, and a classifier that reads the class token alone; this model lacks "
                "one of them."
            )
        norm, classifier = family.pooled_norm(model), family.heads(model)[0]
        target = context.logits.detach().log_softmax(-1)
        terms = []
        for layer in reduction.policy.layers:
            # A stage before layer l selects by the class token that layer l - 1 returns.
            answer = classifier(norm(context.features[layer - 2][:, :1])[:, 0]).to(context.logits.dtype)
            # Through `Task`, so that mixed images count with both of their labels.
            task = Task(label_smoothing=0.0)(replace(context, logits=answer))
            divergence = F.kl_div(answer.log_softmax(-1), target, log_target=True, reduction="batchmean")
            terms.append((1 - self.distilled) * task + self.distilled * divergence)
        return torch.stack(terms).mean()
