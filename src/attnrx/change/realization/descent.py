"""What the fits share: their result, and Adam with learning rates relative to the size of each tensor."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from attnrx.support.shapes import Float, Tensor

# One image in so many is not fitted to: it decides whether a fit is kept.
HELD_OUT = 8


@dataclass
class Fitted:
    """A fitted model, the errors that the fit minimizes, before and after, and notes on the images.

    `repair` has the relative squared error of the output of each block on held-out images, after the repair of the
    blocks before; `distill` one divergence of the outputs on held-out images (`OutputKind.softened`): half the variance
    of the difference of the logits, an eighth of the squared differences of the logits of labels, the squared error of
    a regression relative to its variance, or half the squared distance of embeddings relative to their squared norm.
    `learning_rate` is the one of several that `distill` chose; None if no fit was better than none.
    """

    model: nn.Module
    before: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    learning_rate: float | None = None


def improve_(module: nn.Module, before: float, error: Callable[[], float], fit_: Callable[[], None]) -> float:
    """Fits a module in place, and restores it where its error is not below that `before`; returns the lower one."""
    state = copy.deepcopy(module.state_dict())
    fit_()
    after = error()
    if after < before:  # false for NaN
        return after
    module.load_state_dict(state)
    return before


def descend_(
    module: nn.Module,
    error: Callable[[torch.Generator], Float[Tensor, ""]],
    steps: int,
    learning_rate: float,
    seed: int,
) -> None:
    """Minimizes the error, of images or tokens that it draws, by steps of Adam on all parameters of a module.

    `learning_rate` is relative to the root mean square of each tensor, and decays to zero by a cosine. Frozen
    parameters are fitted too, and are frozen again afterwards.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.numel()]
    flags = [parameter.requires_grad for parameter in parameters]
    # A step of Adam has the size of its learning rate, whatever the scale of the gradient; so that of a tensor is
    # relative to its entries.
    groups = [{"params": [row.requires_grad_()], "lr": learning_rate * _size(row)} for row in parameters]
    optimizer = torch.optim.Adam(groups)
    # From 1 to 0 by half a cosine.
    cosine = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: (1 + math.cos(math.pi * (step / max(steps, 1)))) / 2
    )
    generator = torch.Generator().manual_seed(seed)
    try:
        with torch.enable_grad():
            for _ in range(steps):
                optimizer.zero_grad()
                error(generator).backward()
                optimizer.step()
                cosine.step()
    finally:
        for parameter, flag in zip(parameters, flags, strict=True):
            parameter.grad = None
            parameter.requires_grad_(flag)


def _size(row: Tensor) -> float:
    return float(row.detach().double().square().mean().sqrt().clamp_min(1e-12))
