"""Watching every attention layer of a model while it runs."""

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
    """Calls `observe(layer, observation)` for every layer of every forward pass made inside the context."""
    layers = family.attention(model)
    readouts = [_readout(layer) for layer in layers]
    capture = [layer.backend if isinstance(layer.backend, AttentionCapture) else None for layer in layers]
    watched = enumerate(zip(readouts, capture, strict=True))
    backends = [Observed(partial(observe, index), readout, captured) for index, (readout, captured) in watched]
    with using(layers, backends):
        yield


@contextmanager
def observing_mlp(
    model: nn.Module, family: Family, observe: Callable[[int, int, Tensor, Tensor], None]
) -> Iterator[None]:
    """Calls `observe(layer, which, inputs, outputs)` for both maps of every MLP in every forward pass inside."""
    handles = [
        linear.register_forward_hook(partial(_show, partial(observe, layer, which)))
        for layer, pair in enumerate(family.mlp(model))
        for which, linear in enumerate(pair)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _show(
    observe: Callable[[Tensor, Tensor], None], module: nn.Module, given: tuple[Tensor, ...], outputs: Tensor
) -> None:
    observe(given[0].detach(), outputs.detach())


def _readout(layer: Attention) -> Float[Tensor, "heads reads width"]:
    heads, reads = len(layer.spec.heads), max((*layer.spec.reads, 1))
    return layer.output.spread((reads,) * heads).detach().T.unflatten(0, (heads, reads))


def head_features(
    model: nn.Module, heads: Sequence[nn.Linear], images: Float[Tensor, "batch channels height width"]
) -> Float[Tensor, "batch features"]:
    """Runs the model and returns what its heads are given, side by side where there are several."""
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
    """Evaluation mode without gradients; every module gets its own mode back."""
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
