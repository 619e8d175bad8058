"""The optimizer: which parameter decays, how the learning rate moves, and its state as named tensors."""

import math
from collections.abc import Mapping

import torch
from torch import nn

from attnrx.attention.forms import SvdaForm
from attnrx.errors import CheckpointError
from attnrx.models import family_of
from attnrx.shapes import Tensor
from attnrx.training.config import TrainingConfig


def learning_rate_share(step: int, steps: int, warmup: int) -> float:
    """Gives the share of the full learning rate at a step: a linear rise over `warmup` steps, then a cosine to zero."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def build_optimizer(model: nn.Module, config: TrainingConfig) -> torch.optim.AdamW:
    """Gives AdamW over matrices, which decay, biases and norms, which do not, and strengths, with their own knobs."""
    strengths = {id(strength) for strength in strengths_of(model)}
    groups: dict[str, list[Tensor]] = {"matrices": [], "vectors": [], "strengths": []}
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        kind = "strengths" if id(parameter) in strengths else "matrices" if parameter.ndim > 1 else "vectors"
        groups[kind].append(parameter)
    decay = {"matrices": config.weight_decay, "vectors": 0.0, "strengths": config.strength_decay}
    factor = {"matrices": 1.0, "vectors": 1.0, "strengths": config.strength_learning_rate}
    described = [
        {"params": parameters, "weight_decay": decay[kind], "factor": factor[kind]}
        for kind, parameters in groups.items()
        if parameters
    ]
    return torch.optim.AdamW(described, lr=config.learning_rate, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets the learning rate of every group, times the group's own factor."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["factor"]


def strengths_of(model: nn.Module) -> list[nn.Parameter]:
    """Gives the learned strengths of every layer that has some."""
    layers = family_of(model).attention(model)
    return [layer.scores.strength for layer in layers if isinstance(layer.scores, SvdaForm)]


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Gives the optimizer's state as `PARAMETER/FIELD` tensors."""
    return {
        f"{name}/{field}": value
        for name, parameter in model.named_parameters()
        for field, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer_(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Puts back the state that `optimizer_tensors` gave."""
    parameters = dict(model.named_parameters())
    for key, value in tensors.items():
        name, _, field = key.rpartition("/")
        if name not in parameters:
            raise CheckpointError(f"the checkpoint holds optimizer state of {name!r}, which the model does not have.")
        optimizer.state[parameters[name]][field] = value.to(parameters[name].device)
