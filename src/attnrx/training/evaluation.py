"""Accuracy and cross-entropy over a split."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from attnrx.data import ImageSet
from attnrx.training.sharding import gathered_weights
from attnrx.training.step import Learner


@dataclass(frozen=True)
class Score:
    """Accuracy and cross-entropy of a model on a split."""

    accuracy: float
    loss: float


@torch.no_grad()
def evaluate(learner: Learner, images: ImageSet) -> Score:
    """Evaluates the model on all images, distributed over the processes, possibly in unequal numbers."""
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
            sums += torch.stack([num_correct, losses, torch.tensor(len(batch)).to(losses)])
    correct, loss, count = accelerator.reduce(sums, "sum").tolist()  # type: ignore[union-attr]
    return Score(correct / count, loss / count)
