"""What changes the weights: the optimizer, the learning rate schedule, and a running mean."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from attnrx.support.errors import CheckpointError
from attnrx.support.shapes import Tensor
from attnrx.training.config import TrainingConfig
from attnrx.training.sharding import copy_whole_, local_shard, shard_like
from attnrx.vit.models import family_of

PREDICTORS = "tokens."  # parameter prefix of the predictors of a token policy


@dataclass(frozen=True)
class Schedule:
    """The steps of a run and the learning rate at each: it rises linearly in the warm-up, and falls along a cosine."""

    config: TrainingConfig
    steps_per_epoch: int

    @property
    def steps(self) -> int:
        return self.steps_per_epoch * self.config.epochs

    def rate(self, step: int) -> float:
        warmup, full = round(self.config.warmup * self.steps_per_epoch), self.config.learning_rate
        if step < warmup:
            lowest, share = self.config.warmup_learning_rate, (step + 1) / (warmup + 1)  # so that the first step trains
        else:
            lowest = self.config.min_learning_rate
            share = 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, self.steps - warmup)))
        return lowest + (full - lowest) * share


def build_optimizer(model: nn.Module, config: TrainingConfig) -> torch.optim.AdamW:
    """Returns AdamW with groups for matrices (with weight decay), biases and norms (without), and strengths."""
    strengths = {id(strength) for strength in strengths_of(model)}  # by identity: tensors compare elementwise
    groups: dict[str, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            kind = "strengths" if id(parameter) in strengths else "matrices" if parameter.ndim > 1 else "vectors"
            kind = f"predictor {kind}" if name.startswith(PREDICTORS) else kind
            groups.setdefault(kind, []).append(parameter)
    decay = {"matrices": config.weight_decay, "predictor matrices": config.weight_decay}
    decay["strengths"] = config.strength_decay
    factor = {"strengths": config.strength_learning_rate}
    factor |= dict.fromkeys(("predictor matrices", "predictor vectors"), config.predictor_learning_rate)
    parameter_groups = [
        {"params": parameters, "weight_decay": decay.get(kind, 0.0), "factor": factor.get(kind, 1.0)}
        for kind, parameters in groups.items()
    ]
    # fused: a few kernels for all
    optimizer = torch.optim.AdamW(parameter_groups, lr=config.learning_rate, fused=True, capturable=config.cuda_graph)
    if config.cuda_graph:
        for group in optimizer.param_groups:  # a recorded step reads its learning rates from tensors
            group["lr"] = torch.tensor(config.learning_rate, dtype=torch.float32, device=group["params"][0].device)
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets the learning rate of every group, times the group's factor."""
    for group in optimizer.param_groups:
        value = rate * group["factor"]
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value


def strengths_of(model: nn.Module) -> list[nn.Parameter]:
    """Returns the strengths of the layers whose rows have unit length (SVDA)."""
    strengths = [layer.scores.strengths() for layer in family_of(model).attention(model) if layer.spec.has_norms]
    return [strength for strength in strengths if isinstance(strength, nn.Parameter)]


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Returns the optimizer's state as `PARAMETER/FIELD` tensors."""
    return {
        f"{name}/{field}": value
        for name, parameter in model.named_parameters()
        for field, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer_(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Restores the state of the optimizer; `tensors` are named `PARAMETER/STATE`.

    Raises:
        CheckpointError: A tensor belongs to a parameter that the model does not have.
    """
    parameters = dict(model.named_parameters())
    for key, value in tensors.items():
        name, _, field = key.rpartition("/")
        if name not in parameters:
            raise CheckpointError(f"the checkpoint holds optimizer state of {name!r}, which the model does not have.")
        # The field `step` is a scalar and not of the parameter's shape; `shard_like` does not shard it.
        optimizer.state[parameters[name]][field] = shard_like(value, parameters[name])


class WeightMean:
    """The exponential moving average of a model's parameters, sharded like them; buffers are shared with the model."""

    def __init__(self, model: nn.Module, decay: float):
        self._decay = decay
        self._live = dict(model.named_parameters())
        self.tensors = {name: parameter.detach().clone() for name, parameter in self._live.items()}

    @torch.no_grad()
    def update_(self, step: int) -> None:
        """Updates the mean after `step` steps; the decay is smaller at first, to discard the initial weights."""
        decay = min(self._decay, (1 + step) / (10 + step))
        means, live = ([local_shard(part) for part in parts.values()] for parts in (self.tensors, self._live))
        # One call for all parameters: a kernel for each would take longer than the arithmetic. Each process updates its
        # shards.
        torch._foreach_lerp_(means, live, 1 - decay)

    def load_(self, tensors: Mapping[str, Tensor]) -> None:
        for name, mean in self.tensors.items():
            copy_whole_(mean, tensors[name])

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Swaps the mean into the model inside the context."""
        self.swap_()
        try:
            yield
        finally:
            self.swap_()

    @torch.no_grad()
    def swap_(self) -> None:
        """Exchanges the mean and the weights of the model."""
        for name, parameter in self._live.items():
            live, mean = local_shard(parameter), local_shard(self.tensors[name])
            # In place, because the optimizer and the wrapped model refer to these tensors.
            saved = live.clone()
            live.copy_(mean)
            mean.copy_(saved)
