"""The numbers of an epoch: sums over processes, evaluation, and the history file."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from attnrx.data import ImageSet
from attnrx.errors import CheckpointError
from attnrx.serialization.storage import write_text
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


class History:
    """`history.jsonl`: line n is epoch n, also after interruptions and repeated epochs."""

    def __init__(self, folder: Path):
        self.path = folder / "history.jsonl"
        self.records: list[dict[str, Any]] = []

    def restore(self, epochs: int, write: bool = True) -> None:
        """Reads the first `epochs` records and discards later ones, whose steps will be repeated."""
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        try:
            self.records = [json.loads(line) for line in lines[:epochs]]
        except json.JSONDecodeError as error:
            raise CheckpointError(
                f"{self.path} is damaged ({error}); delete the run's folder and train again."
            ) from error
        if len(self.records) < epochs:
            raise CheckpointError(
                f"{self.path} has {len(self.records)} epochs and the checkpoint {epochs}: lines were removed. "
                "Put the file back, or delete the run's folder and train again."
            )
        if write:
            self.write()

    def write(self) -> None:
        """Writes the records to the file, atomically."""
        write_text(self.path, "".join(json.dumps(record) + "\n" for record in self.records))
