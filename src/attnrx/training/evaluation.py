"""Accuracy and cross-entropy over a split."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from attnrx.data import ImageSet
from attnrx.training.sharding import gathered
from attnrx.training.step import Learner


@dataclass(frozen=True)
class Score:
    """How well a model does on a split."""

    accuracy: float
    loss: float


@torch.no_grad()
def evaluate(learner: Learner, images: ImageSet) -> Score:
    """Runs the model over all images, shared among the processes: each its own, and not always as many as others."""
    accelerator, model = learner.accelerator, learner.model
    sums = torch.zeros(3, dtype=torch.float64, device=accelerator.device)
    model.eval()
    with gathered(model):
        for batch in images.batches(learner.config.batch_size, device=accelerator.device, shard=learner.shard):
            with learner.autocast():
                logits = model(batch.images.to(learner.dtype))
            losses = F.cross_entropy(
                logits.to(torch.promote_types(logits.dtype, torch.float32)), batch.labels, reduction="sum"
            )
            right = (logits.argmax(-1) == batch.labels).sum()
            sums += torch.stack([right, losses, torch.tensor(len(batch)).to(losses)])
    correct, loss, count = accelerator.reduce(sums, "sum").tolist()  # type: ignore[union-attr]
    return Score(correct / count, loss / count)
