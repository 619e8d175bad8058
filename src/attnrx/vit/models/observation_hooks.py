"""Observes module calls and attention maps in a model's forward passes, and finds the model's blocks."""

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
    """One call of a module. `tokens` is its first argument. `args` and `kwargs` are its other arguments."""

    module: nn.Module
    tokens: Tensor
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any

    @property
    def output_tokens(self) -> Tensor:
        """The output, or its first element if the output is a tuple, as in some transformers blocks."""
        return self.output[0] if isinstance(self.output, tuple) else self.output

    @property
    def tokens_as_output(self) -> Any:
        """What an identity module would return: the input tokens in the output's structure (a tensor or a tuple)."""
        return (self.tokens, *self.output[1:]) if isinstance(self.output, tuple) else self.tokens


@contextmanager
def without_autocast() -> Iterator[None]:
    """Turns autocast off inside the context, because autocast would change measured values."""
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
        modules: Modules that take a tensor as their first argument.
        observe: A function that is called with a record of every module call, in the order in which the calls end.
        by_image: Whether the model may run a batch in chunks. If False, the model runs the whole batch at once, and its
            last block receives all tokens.
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
    """Returns the name of the argument that contains the tokens, for a call without positional arguments."""
    return next((name for name in ("hidden_states", "query", *options) if name in options), "")


def tokens_in(args: tuple[Any, ...], options: Mapping[str, Any]) -> Float[Tensor, "batch *sizes"]:
    """Returns the tokens in a call's arguments, which may be passed by position or by name."""
    return args[0] if args else options[name_of_tokens(options)]


def with_tokens(
    args: tuple[Any, ...], options: dict[str, Any], tokens: Float[Tensor, "batch *sizes"]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns a call's arguments, in which `tokens` replace the original tokens."""
    return ((tokens, *args[1:]), options) if args else (args, {**options, name_of_tokens(options): tokens})


@contextmanager
def recording_calls(
    modules: Iterable[nn.Module], keep: Callable[[ModuleCall], Kept], by_image: bool = False
) -> Iterator[list[Kept]]:
    """Yields a list that collects the result of `keep` for every call of the modules. You may clear the list."""
    kept: list[Kept] = []
    with observing_calls(modules, lambda call: kept.append(keep(call)), by_image):
        yield kept


@contextmanager
def observing(model: nn.Module, family: Family, observe: Callable[[int, Observation], None]) -> Iterator[None]:
    """Calls `observe(layer, observation)` for every layer of every forward pass inside the context."""
    # A backend observes the layers, because attention maps exist only inside backends, and fused kernels never store
    # them. If a layer has a token reducer's backend, the observing backend also captures for the reducer.
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
    # The output projection's columns are sorted by head, and padded like the values in `Observed`.
    return layer.output.spread((v_head_dim,) * heads).detach().T.unflatten(0, (heads, v_head_dim))


@contextmanager
def observing_mlp(
    model: nn.Module, family: Family, observe: Callable[[int, int, Tensor, Tensor], None]
) -> Iterator[None]:
    """Calls `observe(layer, which, inputs, outputs)` for both linear maps of every MLP inside the context."""
    maps = {linear: (layer, which) for layer, pair in enumerate(family.mlp(model)) for which, linear in enumerate(pair)}
    # With hooks on its maps, `FusedMLP` calls them one by one, and batches are not split (`chunked_forward`).
    with observing_calls(maps, lambda call: observe(*maps[call.module], call.tokens.detach(), call.output.detach())):
        yield


@contextmanager
def replacing_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replaces a module's `forward` inside the context. The module's hooks still run."""
    # The instance attribute hides the class's method. The hook is needed, because kernels may compute modules without
    # hooks and never call them, and because batches would be split into chunks.
    module.forward = forward
    try:
        with observing_calls((module,), lambda call: None):
            yield
    finally:
        del module.forward  # restores the method of the class


def recording_blocks(model: nn.Module, family: Family) -> AbstractContextManager[list[Tensor]]:
    """Returns a context manager whose list collects every block's output in each forward pass.

    You may clear the list.
    """
    return recording_calls(blocks_of(model, family), lambda call: call.output_tokens)


@contextmanager
def counted_by_spec(model: nn.Module, family: Family) -> Iterator[None]:
    """Lets attention run on the eager backend without padding, so that counted MACs match the closed-form MACs.

    Inside the context, token reducers receive uniform attention maps, so the logits differ from the model's usual
    logits. The MACs are the same, because they do not depend on which tokens are pruned.
    """
    layers = family.attention(model)
    with ExitStack() as hooks:
        # `Eager` captures nothing, so a hook after the layer gives reducers their statistics.
        for layer in layers:
            if isinstance(layer.backend, AttentionCapture) and layer.backend.wanted:
                hooks.enter_context(layer.register_forward_hook(partial(capture_uniform, layer.backend)))
        hooks.enter_context(using(layers, [Eager()] * len(layers)))
        yield


def blocks_of(model: nn.Module, family: Family) -> tuple[nn.Module, ...]:
    """Returns the model's blocks, in order."""
    return tuple(model.get_submodule(name) for name in family.block_names(model))
