"""One optimization step: forward, losses, backward, clipping, update."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import nn

from attnrx.data import Batch
from attnrx.losses import LossContext
from attnrx.shapes import Tensor
from attnrx.training.averaging import WeightMean
from attnrx.training.config import TrainingConfig
from attnrx.training.meter import Meter
from attnrx.training.optimization import learning_rate_share, set_learning_rate
from attnrx.training.randomness import NOISE, STEP, derived_seed


@dataclass(frozen=True)
class Schedule:
    """The steps of a run and the learning rate at each."""

    full_rate: float
    steps_per_epoch: int
    steps: int
    warmup: int

    @classmethod
    def of(cls, config: TrainingConfig, images: int) -> "Schedule":
        """Counts the steps over so many training images."""
        per_epoch = images // config.batch_size
        return cls(config.learning_rate, per_epoch, per_epoch * config.epochs, round(config.warmup * per_epoch))

    def rate(self, step: int) -> float:
        """Gives the learning rate of a step."""
        return self.full_rate * learning_rate_share(step, self.steps, self.warmup)


@dataclass
class Learner:
    """The model in training with all that moves with it; `wrapped` is what makes steps: compiled or distributed."""

    model: nn.Module
    wrapped: Callable[[Tensor], Tensor]
    optimizer: torch.optim.Optimizer
    mean: WeightMean | None
    meter: Meter
    accelerator: Accelerator
    config: TrainingConfig
    schedule: Schedule
    first_bad: Tensor

    @property
    def shard(self) -> tuple[int, int]:
        """Which process this is, of how many."""
        return self.accelerator.process_index, self.accelerator.num_processes

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights."""
        return next(self.model.parameters()).dtype

    def autocast(self) -> AbstractContextManager:
        """Runs matrix products in bfloat16 where the config says so; the weights stay as they are."""
        device = self.accelerator.device.type
        return torch.autocast(device, torch.bfloat16, enabled=self.config.precision == "bf16")

    def step_(self, batch: Batch, step: int) -> None:
        """Makes one step with this process's share of the batch."""
        process, processes = self.shard
        torch.manual_seed(derived_seed(self.config.seed, STEP, step, process))
        set_learning_rate(self.optimizer, self.schedule.rate(step))
        images = batch.images.to(self.dtype)
        with self.autocast():
            logits = self.wrapped(images)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            seed = derived_seed(self.config.seed, NOISE, step)
            context = LossContext(self.model, images, batch.labels, logits, seed, self.shard)
            terms = [loss(context) for loss in self.config.losses]
        total = torch.stack([loss.weight * term for loss, term in zip(self.config.losses, terms, strict=True)]).sum()
        # A batch may lack images that could not be decoded: with this factor N processes still equal one.
        self.accelerator.backward(total * (len(batch) * processes / self.config.batch_size))
        norm = self._update_(step)
        self._note_(step, [*(term.detach() for term in terms), total.detach(), norm], logits.detach(), batch.labels)

    def _update_(self, step: int) -> Tensor:
        clip = self.config.gradient_clip
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), float("inf") if clip is None else clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.mean is not None:
            self.mean.update_(step)
        return norm

    def _note_(self, step: int, values: list[Tensor], logits: Tensor, labels: Tensor) -> None:
        correct = (logits.argmax(-1) == labels).sum()
        self.meter.add_([*values, correct, float(len(labels)), 1.0])
        finite = torch.isfinite(values[-2]) & torch.isfinite(values[-1])
        self.first_bad.copy_(torch.where(finite, self.first_bad, self.first_bad.clamp(max=step)))
