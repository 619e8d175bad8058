"""Accuracy and loss on a split."""

import torch
import torch.nn.functional as F

from attnrx.data import ImageSet
from attnrx.training.sharding import gathered_weights
from attnrx.training.step import Learner


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
