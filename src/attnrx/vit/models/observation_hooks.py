"""Observes module calls and attention maps during a model's forward passes, and finds the model's blocks."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from attnrx.support.shapes import Float, Tensor
from attnrx.vit.attention import Attention, AttentionCapture, Eager, Observation, Observed, capture_uniform, using
from attnrx.vit.models.family import Family

Kept = TypeVar("Kept")


class ModuleCall(NamedTuple):
    """One call of a module. `tokens` is its first argument. `args` and `kwargs` are the others, e.g. rotations."""

    module: nn.Module
    tokens: Tensor
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any

    @property
    def output_tokens(self) -> Tensor:
        """The output, or its first element for blocks of transformers that return a tuple."""
        return self.output[0] if isinstance(self.output, tuple) else self.output

    @property
    def tokens_as_output(self) -> Any:
        """The input tokens in the format of the output, as if the module had changed nothing."""
        return (self.tokens, *self.output[1:]) if isinstance(self.output, tuple) else self.tokens


@contextmanager
def without_autocast() -> Iterator[None]:
    """Leaves autocast inside the context, because it would change the measured values."""
    with ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextmanager
def observing_calls(
    modules: Iterable[nn.Module], observe: Callable[[ModuleCall], object], by_image: bool = False
) -> Iterator[None]:
    """Inside the context, calls `observe` after every call of one of the modules.

    Args:
        modules: Modules whose first argument is a tensor.
        observe: Receives every call, in the order in which the calls end.
        by_image: Whether chunks of a batch may be observed one after another. If not, the model runs the whole batch at
            once, and its last block receives all tokens.
    """

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        others = dict(kwargs)
        tokens = args[0] if args else others.pop(name_of_tokens(others), None)
        with without_autocast():
            observe(ModuleCall(module, tokens, args[1:], others, output))

    hook.by_image = by_image  # type: ignore[attr-defined]
    with ExitStack() as hooks:
        for module in dict.fromkeys(modules):
            hooks.enter_context(module.register_forward_hook(hook, with_kwargs=True))
        yield


def name_of_tokens(options: Mapping[str, Any]) -> str:
    """Returns the argument name of the tokens in a call that passes them by name, as transformers does."""
    return next((name for name in ("hidden_states", "query", *options) if name in options), "")


def tokens_in(args: tuple[Any, ...], options: Mapping[str, Any]) -> Float[Tensor, "batch *sizes"]:
    """Returns the tokens of a call, which passes them by position or by name."""
    return args[0] if args else options[name_of_tokens(options)]


def with_tokens(
    args: tuple[Any, ...], options: dict[str, Any], tokens: Float[Tensor, "batch *sizes"]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a call with other tokens."""
    return ((tokens, *args[1:]), options) if args else (args, {**options, name_of_tokens(options): tokens})


@contextmanager
def recording_calls(
    modules: Iterable[nn.Module], keep: Callable[[ModuleCall], Kept], by_image: bool = False
) -> Iterator[list[Kept]]:
    """Collects what `keep` returns for every call of the modules inside the context. The caller may clear the list."""
    kept: list[Kept] = []
    with observing_calls(modules, lambda call: kept.append(keep(call)), by_image):
        yield kept


@contextmanager
def observing(model: nn.Module, family: Family, observe: Callable[[int, Observation], None]) -> Iterator[None]:
    """Calls `observe(layer, observation)` for every layer of every forward pass inside the context."""
    # A backend, not a hook on the layer, because the maps exist only inside the backend, and fused kernels never store
    # them. This backend also captures for a token reducer if it replaces the reducer's backend.
    layers = family.attention(model)

    def precisely(index: int, observation: Observation) -> None:
        with without_autocast():
            observe(index, observation)

    backends = [
        Observed(
            partial(precisely, index),
            _output_projection(layer),
            layer.backend if isinstance(layer.backend, AttentionCapture) else None,
        )
        for index, layer in enumerate(layers)
    ]
    with using(layers, backends):
        yield


def _output_projection(layer: Attention) -> Float[Tensor, "heads v_head_dim width"]:
    heads, v_head_dim = len(layer.spec.heads), max((*layer.spec.value_dims, 1))
    if not heads:
        return layer.output.weight.new_zeros(0, v_head_dim, layer.spec.width)
    # The columns of the output projection, sorted by head, and padded as `Observed` pads the values.
    return layer.output.spread((v_head_dim,) * heads).detach().T.unflatten(0, (heads, v_head_dim))


@contextmanager
def observing_mlp(
    model: nn.Module, family: Family, observe: Callable[[int, int, Tensor, Tensor], None]
) -> Iterator[None]:
    """Calls `observe(layer, which, inputs, outputs)` for each of the two maps of every MLP inside the context."""
    maps = {linear: (layer, which) for layer, pair in enumerate(family.mlp(model)) for which, linear in enumerate(pair)}
    # The hooks make `FusedMLP` call its maps one by one, and keep batches whole (`chunked_forward`).
    with observing_calls(maps, lambda call: observe(*maps[call.module], call.tokens.detach(), call.output.detach())):
        yield


@contextmanager
def replacing_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replaces what a module computes inside the context. Its hooks still run."""
    # Set on the instance, which hides the method of the class. The hook is needed because a kernel may compute a module
    # without hooks and not call it, or compute a batch in chunks.
    module.forward = forward
    try:
        with observing_calls((module,), lambda call: None):
            yield
    finally:
        del module.forward  # restores the method of the class


def recording_blocks(model: nn.Module, family: Family) -> AbstractContextManager[list[Tensor]]:
    """Collects the output of every block in each forward pass. The caller clears the list."""
    return recording_calls(blocks_of(model, family), lambda call: call.output_tokens)


@contextmanager
def counted_by_spec(model: nn.Module, family: Family) -> Iterator[None]:
    """Runs every layer on the eager backend, without padding, so an operation counter finds the MACs of the specs.

    Token reducers receive uniform attention maps here. The logits then differ from the model's logits, but the costs do
    not, because they do not depend on the choice of pruned tokens.
    """
    layers = family.attention(model)
    with ExitStack() as hooks:
        # `Eager` captures nothing, so reducers receive their statistics from a hook after the layer.
        for layer in layers:
            if isinstance(layer.backend, AttentionCapture) and layer.backend.wanted:
                hooks.enter_context(layer.register_forward_hook(partial(capture_uniform, layer.backend)))
        hooks.enter_context(using(layers, [Eager()] * len(layers)))
        yield


def blocks_of(model: nn.Module, family: Family) -> tuple[nn.Module, ...]:
    """Returns the blocks of the model, in order."""
    return tuple(model.get_submodule(name) for name in family.block_names(model))
