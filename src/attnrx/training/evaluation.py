"""Accuracy and cross-entropy over a split."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn

from attnrx.data.images import ImageSet


@dataclass(frozen=True)
class Score:
    """How well a model does on a split."""

    accuracy: float
    loss: float


@torch.no_grad()
def evaluate(
    model: nn.Module,
    images: ImageSet,
    batch_size: int,
    accelerator: Accelerator,
    autocast: Callable[[], AbstractContextManager],
) -> Score:
    """Runs the model over all images, shared among the processes, and leaves it in the mode it was in."""
    shard = (accelerator.process_index, accelerator.num_processes)
    dtype = next(model.parameters()).dtype
    sums = torch.zeros(3, dtype=torch.float64, device=accelerator.device)
    was_training = model.training
    model.eval()
    for batch in images.batches(batch_size, device=accelerator.device, shard=shard):
        with autocast():
            logits = model(batch.images.to(dtype)).float()
        loss = F.cross_entropy(logits, batch.labels, reduction="sum")
        correct = (logits.argmax(-1) == batch.labels).sum()
        sums += torch.stack([correct.double(), loss.double(), torch.full_like(loss, len(batch)).double()])
    model.train(was_training)
    correct, loss, count = accelerator.reduce(sums, "sum").tolist()  # type: ignore[union-attr]
    return Score(correct / count, loss / count)
