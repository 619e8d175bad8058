"""Hooks that observe every attention layer and MLP of a model during its forward passes."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from attnrx.attention import Attention, AttentionCapture, Observed, using
from attnrx.models.family import Family
from attnrx.observation import Observation
from attnrx.shapes import Float, Tensor


@contextmanager
def observing(model: nn.Module, family: Family, observe: Callable[[int, Observation], None]) -> Iterator[None]:
    """Calls `observe(layer, observation)` for every layer of every forward pass inside the context."""
    layers = family.attention(model)
    projections = [_output_projection(layer) for layer in layers]
    captures = [layer.backend if isinstance(layer.backend, AttentionCapture) else None for layer in layers]
    pairs = enumerate(zip(projections, captures, strict=True))
    backends = [Observed(partial(observe, index), projection, capture) for index, (projection, capture) in pairs]
    with using(layers, backends):
        yield


@contextmanager
def observing_mlp(
    model: nn.Module, family: Family, observe: Callable[[int, int, Tensor, Tensor], None]
) -> Iterator[None]:
    """Calls `observe(layer, which, inputs, outputs)` for both maps of every MLP in every forward pass inside the
    context.
    """
    handles = [
        linear.register_forward_hook(partial(_observe_linear, partial(observe, layer, which)))
        for layer, pair in enumerate(family.mlp(model))
        for which, linear in enumerate(pair)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _observe_linear(
    observe: Callable[[Tensor, Tensor], None], module: nn.Module, args: tuple[Tensor, ...], outputs: Tensor
) -> None:
    observe(args[0].detach(), outputs.detach())


def _output_projection(layer: Attention) -> Float[Tensor, "heads v_head_dim width"]:
    heads, v_head_dim = len(layer.spec.heads), max((*layer.spec.reads, 1))
    return layer.output.spread((v_head_dim,) * heads).detach().T.unflatten(0, (heads, v_head_dim))


def head_features(
    model: nn.Module, heads: Sequence[nn.Linear], images: Float[Tensor, "batch channels height width"]
) -> Float[Tensor, "batch features"]:
    """Runs the model and returns the inputs of its heads, concatenated where there are several."""
    state: dict[nn.Module, Tensor] = {}
    handles = [head.register_forward_pre_hook(lambda head, given: state.update({head: given[0]})) for head in heads]
    try:
        model(images)
    finally:
        for handle in handles:
            handle.remove()
    return torch.cat([state[head] for head in heads], dim=-1)


@contextmanager
def evaluating(models: Iterable[nn.Module]) -> Iterator[None]:
    """Sets evaluation mode and disables gradients; restores the mode of every module at the end."""
    models = tuple(models)
    modes = [(module, module.training) for model in models for module in model.modules()]
    try:
        with torch.no_grad():
            for model in models:
                model.eval()
            yield
    finally:
        for module, training in modes:
            module.training = training
