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
from attnrx.training.sharding import collecting, release_, whole
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
        """Counts the steps over so many training images."""
        per_epoch = images // config.batch_size
        rates = config.learning_rate, config.warmup_learning_rate, config.min_learning_rate
        return cls(*rates, per_epoch, per_epoch * config.epochs, round(config.warmup * per_epoch))

    def rate(self, step: int) -> float:
        """Returns the learning rate of a step."""
        lowest = self.first_rate if step < self.warmup else self.last_rate
        return lowest + (self.full_rate - lowest) * learning_rate_share(step, self.steps, self.warmup)


@dataclass(frozen=True)
class _Chunk:
    """What goes through the model at once, as `LossContext` has it."""

    images: Float[Tensor, "batch channels height width"]
    labels: Int[Tensor, "batch"]
    partners: Int[Tensor, "batch"] | None
    share: float
    seed: int
    progress: float
    shard: tuple[int, int]


@dataclass
class Learner:
    """The model in training with all that moves with it; `wrapped` is what makes steps: compiled or distributed.

    `target` is the model of the caller, which is another one where the weights of `model` are held in parts.
    `features` fills with what the blocks give in each forward pass, where a loss reads that.
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
        torch.manual_seed(derived_seed(self.config.seed, STEP, step, self.shard[0]))
        set_learning_rate(self.optimizer, self.schedule.rate(step), step / self.schedule.steps)
        self._set_temperature(step)
        parts = self._parts(batch, step)
        values, correct = [], []
        for number, part in enumerate(parts):
            last = number + 1 == len(parts)
            with nullcontext() if last else collecting(self.wrapped, self.accelerator):
                terms, right = self._learn_(part)
            values.append(terms * (len(part.labels) / len(batch)))
            correct.append(right)
        release_(self.model)
        norm = self._update_(step)
        self._note_(step, [*torch.stack(values).sum(0), norm], torch.stack(correct).sum(), len(batch))

    def _set_temperature(self, step: int) -> None:
        """Sets the temperature at which a learned reducer draws what stays."""
        reduction = reduction_of(self.model)
        if reduction is not None:
            first, last = self.config.temperatures
            reduction.temperature = first * (last / first) ** (step / max(1, self.schedule.steps - 1))

    def _parts(self, batch: Batch, step: int) -> "list[_Chunk]":
        """Mixes the batch where the config says so, then cuts it into the parts that run one after another."""
        process, processes = self.shard
        count = self.config.accumulate
        mixed = Mixed(batch.images, None, 1.0)
        if self.config.mixing is not None:
            mixed = self.config.mixing.apply(batch, derived_seed(self.config.seed, MIXING, step))
        size = self.config.batch_size // (processes * count)  # a batch may lack images that could not be decoded
        cuts = [slice(start, start + size) for start in range(0, len(batch), size)]
        seed = derived_seed(self.config.seed, NOISE, step)
        return [
            _Chunk(
                images=mixed.images[cut].to(self.dtype),
                labels=batch.labels[cut],
                partners=None if mixed.partners is None else mixed.partners[cut],
                share=mixed.share,
                seed=seed,
                progress=step / self.schedule.steps,
                shard=(process * count + number, processes * count),
            )
            for number, cut in enumerate(cuts)
        ]

    def _learn_(self, part: "_Chunk") -> tuple[Float[Tensor, "terms"], Tensor]:
        """Runs one part forward and back; gives every term, their weighted sum, and how many answers are right."""
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
        right = (logits.detach().argmax(-1) == part.labels).sum()
        return torch.stack([*(term.detach() for term in terms), total.detach()]), right

    def _update_(self, step: int) -> Tensor:
        clip = self.config.gradient_clip
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), float("inf") if clip is None else clip)
        self.optimizer.step()
        if self.config.nonnegative_fusion:
            constrain_(self.model)
        self.optimizer.zero_grad(set_to_none=True)
        if self.mean is not None:
            self.mean.update_(step)
        return whole(norm)

    def _note_(self, step: int, values: list[Tensor], correct: Tensor, images: int) -> None:
        # Of N processes each adds an Nth of a step, so that the sums mean the same to a run that goes on with others.
        share = 1 / self.shard[1]
        self.meter.add_([*(value * share for value in values), correct, float(images), share])
        finite = torch.isfinite(values[-2]) & torch.isfinite(values[-1])
        self.first_bad.copy_(torch.where(finite, self.first_bad, self.first_bad.clamp(max=step)))
