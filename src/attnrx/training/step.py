"""One optimization step: forward, losses, backward, clipping, update."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from attnrx.data import Batch
from attnrx.losses import LossContext
from attnrx.models import reduction_of
from attnrx.shapes import Float, Int, Tensor
from attnrx.training.config import TrainingConfig
from attnrx.training.epoch_sums import Meter
from attnrx.training.fusion import constrain_
from attnrx.training.mixing import Mixed
from attnrx.training.optimization import learning_rate_share, set_learning_rate
from attnrx.training.randomness import MIXING, NOISE, STEP, derived_seed
from attnrx.training.sharding import collecting, full_tensor, release_
from attnrx.training.weight_average import WeightMean

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(frozen=True)
class Schedule:
    """The steps of a run and the learning rate at each."""

    full_rate: float
    first_rate: float
    last_rate: float
    steps_per_epoch: int
    steps: int
    warmup: int

    @classmethod
    def of(cls, config: TrainingConfig, images: int) -> "Schedule":
        """Returns the schedule for this number of training images."""
        per_epoch = images // config.batch_size
        rates = config.learning_rate, config.warmup_learning_rate, config.min_learning_rate
        return cls(*rates, per_epoch, per_epoch * config.epochs, round(config.warmup * per_epoch))

    def rate(self, step: int) -> float:
        """Returns the learning rate of a step."""
        lowest = self.first_rate if step < self.warmup else self.last_rate
        return lowest + (self.full_rate - lowest) * learning_rate_share(step, self.steps, self.warmup)


@dataclass(frozen=True)
class _Chunk:
    """A micro-batch, with the fields of `LossContext`."""

    images: Float[Tensor, "batch channels height width"]
    labels: Int[Tensor, "batch"]
    partners: Int[Tensor, "batch"] | None
    share: float
    seed: int
    progress: float
    shard: tuple[int, int]


@dataclass
class Learner:
    """The model in training with its optimizer and state; `wrapped` is the compiled or distributed model that runs the
    steps.

    `target` is the caller's model; it differs from `model` if the weights are sharded. `features` receives the outputs
    of the blocks in each forward pass, if a loss needs them.
    """

    model: nn.Module
    target: nn.Module
    wrapped: Callable[[Tensor], Tensor]
    optimizer: torch.optim.Optimizer
    mean: WeightMean | None
    meter: Meter
    accelerator: "Accelerator"
    config: TrainingConfig
    schedule: Schedule
    first_bad: Tensor
    features: list[Tensor] | None

    @property
    def shard(self) -> tuple[int, int]:
        """The index of this process and the number of processes."""
        return self.accelerator.process_index, self.accelerator.num_processes

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return next(self.model.parameters()).dtype

    def autocast(self) -> AbstractContextManager:
        """Returns a context with bfloat16 matrix products if the config requests it; the weights keep their dtype."""
        device = self.accelerator.device.type
        return torch.autocast(device, torch.bfloat16, enabled=self.config.precision == "bf16")

    def step_(self, batch: Batch, step: int) -> None:
        """Runs one step with this process's share of the batch."""
        torch.manual_seed(derived_seed(self.config.seed, STEP, step, self.shard[0]))
        set_learning_rate(self.optimizer, self.schedule.rate(step), step / self.schedule.steps)
        self._set_temperature(step)
        parts = self._parts(batch, step)
        values, correct = [], []
        for number, part in enumerate(parts):
            last = number + 1 == len(parts)
            with nullcontext() if last else collecting(self.wrapped, self.accelerator):
                terms, num_correct = self._forward_backward_(part)
            values.append(terms * (len(part.labels) / len(batch)))
            correct.append(num_correct)
        release_(self.model)
        norm = self._update_(step)
        self._record_(step, [*torch.stack(values).sum(0), norm], torch.stack(correct).sum(), len(batch))

    def _set_temperature(self, step: int) -> None:
        """Sets the sampling temperature of a learned token reducer."""
        reduction = reduction_of(self.model)
        if reduction is not None:
            first, last = self.config.temperatures
            reduction.temperature = first * (last / first) ** (step / max(1, self.schedule.steps - 1))

    def _parts(self, batch: Batch, step: int) -> "list[_Chunk]":
        """Mixes the batch if the config requests it, then splits it into micro-batches."""
        process, processes = self.shard
        count = self.config.accumulate
        mixed = Mixed(batch.images, None, 1.0)
        if self.config.mixing is not None:
            mixed = self.config.mixing.apply(batch, derived_seed(self.config.seed, MIXING, step))
        size = self.config.batch_size // (processes * count)  # a batch may lack images that could not be decoded
        slices = [slice(start, start + size) for start in range(0, len(batch), size)]
        seed = derived_seed(self.config.seed, NOISE, step)
        return [
            _Chunk(
                images=mixed.images[indices].to(self.dtype),
                labels=batch.labels[indices],
                partners=None if mixed.partners is None else mixed.partners[indices],
                share=mixed.share,
                seed=seed,
                progress=step / self.schedule.steps,
                shard=(process * count + number, processes * count),
            )
            for number, indices in enumerate(slices)
        ]

    def _forward_backward_(self, part: "_Chunk") -> tuple[Float[Tensor, "terms"], Tensor]:
        """Runs one micro-batch forward and backward; returns every term, their weighted sum, and the number of correct
        labels.
        """
        if self.features is not None:
            self.features.clear()
        with self.autocast():
            logits = self.wrapped(part.images)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            features = tuple(self.features or ())
            context = LossContext(self.model, logits=logits, features=features, **vars(part))
            terms = [loss(context) for loss in self.config.losses]
        total = torch.stack([loss.weight * term for loss, term in zip(self.config.losses, terms, strict=True)]).sum()
        # A batch may lack images that could not be decoded: with this factor N processes still equal one.
        self.accelerator.backward(total * (len(part.labels) * self.shard[1] / self.config.batch_size))
        num_correct = (logits.detach().argmax(-1) == part.labels).sum()
        return torch.stack([*(term.detach() for term in terms), total.detach()]), num_correct

    def _update_(self, step: int) -> Tensor:
        clip = self.config.gradient_clip
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), float("inf") if clip is None else clip)
        self.optimizer.step()
        if self.config.nonnegative_fusion:
            constrain_(self.model)
        self.optimizer.zero_grad(set_to_none=True)
        if self.mean is not None:
            self.mean.update_(step)
        return full_tensor(norm)

    def _record_(self, step: int, values: list[Tensor], correct: Tensor, images: int) -> None:
        # Each of N processes adds 1/N of a step, so that a run can be resumed with another number of processes.
        share = 1 / self.shard[1]
        self.meter.add_([*(value * share for value in values), correct, float(images), share])
        finite = torch.isfinite(values[-2]) & torch.isfinite(values[-1])
        self.first_bad.copy_(torch.where(finite, self.first_bad, self.first_bad.clamp(max=step)))
