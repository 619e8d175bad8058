"""Adds token pruning or merging to models, by hooks on blocks and by attention backends that capture statistics."""

from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from attnrx.support.errors import InvalidInput, NotSupported
from attnrx.support.records import to_dict
from attnrx.support.shapes import Tensor
from attnrx.vit.attention import Attention, AttentionCapture, capture_uniform
from attnrx.vit.attention.attention import BACKENDS
from attnrx.vit.models.family import Family
from attnrx.vit.models.observation_hooks import blocks_of, tokens_in, with_tokens
from attnrx.vit.models.parts.merging_in_layers import MergingInLayers
from attnrx.vit.models.parts.record import TOKENS, record_of
from attnrx.vit.models.parts.token_reduction import TokenReduction, TokenRun, reduction_of
from attnrx.vit.tokens import TokenPolicy


def attach_tokens_(
    model: nn.Module, family: Family, policy: TokenPolicy, by: str = "compress", heads: int | None = None
) -> TokenReduction:
    """Attaches a token policy to a model in place, and returns the new `TokenReduction` with untrained predictors.

    Args:
        model: The model to change.
        family: The model's family.
        policy: The reducer, the layers before which it runs, and how many tokens it keeps.
        by: "compress" removes tokens. "mask" keeps all tensor shapes and masks pruned tokens in the attention.
        heads: The number of heads in the original model. Pass it if heads may have been removed from every layer.

    Raises:
        InvalidInput: The model has a policy already, or the policy does not fit the model's layers.
        NotSupported: The policy needs a class token or a kind of pooling that the model lacks.
    """
    specs, record = family.specs(model), record_of(model)
    if reduction_of(model) is not None:
        raise InvalidInput("this model already has a token policy; attach a policy to the original.")
    shape = family.token_shape(model, heads)
    layout = shape.layout
    policy = policy.on(layout, len(specs))
    weight = next(model.parameters())
    kind = MergingInLayers if layout.in_layers else TokenReduction
    reduction = kind(policy, shape, by).to(weight.device, weight.dtype)
    setattr(model, "tokens" if record is None else TOKENS, reduction)
    if policy.counts(layout.patches)[-1] == layout.patches:
        return reduction.train(model.training)  # no token is ever pruned, so the model stays bit-identical
    # Hooks are used because the blocks may come from any library. Their own forward methods then run on the remaining
    # tokens, without subclasses.
    if isinstance(reduction, MergingInLayers):
        _attach_in_layers_(model, family, reduction)
        _attach_pass_(model, family, reduction)
        return reduction.train(model.training)
    stages = {layer - 1: stage for stage, layer in enumerate(policy.layers)}  # layers count from 1
    for index, block in enumerate(blocks_of(model, family)):
        # The input of a block is the output of the block before it.
        adds = policy.reducer.every_layer == "tokens" and 0 < index < policy.layers[-1]
        _first_(block, partial(reduction.enter, stages.get(index), adds))
        _first_(block, partial(reduction.leave, index), returned=True)
    # If a user calls a library method on the inner model, all patches are restored after every block. A forward pass of
    # the model itself restores them only where they are needed (`Adopted.forward_pass`, `PassHook`).
    if family.restored_blocks(model) is not None:
        reduction.restored_blocks = range(len(specs))
    _attach_pass_(model, family, reduction)
    for index, spec in enumerate(specs, 1):
        # A stage runs before a layer, so it needs captures from the layer before.
        decides = index + 1 in policy.layers
        quantities = set(policy.reducer.needs) if decides else set()
        if index < policy.layers[-1] and policy.reducer.every_layer in ("attention", "class_attention"):
            quantities.add(policy.reducer.every_layer)
        # All sizes are 1 before the first stage, so any backend can compute these layers.
        uses_sizes = reduction.counts_sizes or policy.reducer.learned
        captures = bool(quantities) or (uses_sizes and index >= policy.layers[0])
        # A library's own attention can neither capture nor select positions. It stays in layers that need neither.
        has_positions = spec.traits.rotates or spec.pair_bias
        if not captures and not has_positions and record is not None:
            continue
        layer = family.installed_(model, index - 1)
        layer.kept_patches = reduction.kept_patches
        if captures:
            stored = layer.spec.heads if layer.spec.attends else ()
            windows = layout.windows if index - 1 in layout.joined else 1
            receive = partial(reduction.add_capture, stored, decides=decides, windows=windows)
            wanted = tuple(sorted(quantities))
            sizes, logarithms = partial(reduction.sizes, windows), partial(reduction.log_sizes, windows)
            layer.backend = AttentionCapture(sizes, receive, wanted, logarithms)
            if quantities and not stored:
                layer.register_forward_hook(partial(capture_uniform, layer.backend))
    _attach_pooling_(model, family, reduction)
    return reduction.train(model.training)


def _attach_pass_(model: nn.Module, family: Family, reduction: TokenReduction) -> None:
    """Attaches the hooks that start and end a forward pass of the model."""
    restored_blocks = family.restored_blocks(model)
    if record_of(model) is not None and restored_blocks is not None:
        hook = PassHook(reduction, restored_blocks)
        model.register_forward_pre_hook(hook.enter, with_kwargs=True)
        model.register_forward_hook(hook.leave, with_kwargs=True, always_call=True)
    _first_(family.patch_embedding(model), reduction.begin)


def _attach_in_layers_(model: nn.Module, family: Family, reduction: MergingInLayers) -> None:
    """Attaches hooks to every attention and every MLP that computes on merged tokens."""
    blocks, axis = blocks_of(model, family), family.grid_axis(model)
    assert axis is not None  # otherwise, tokens are not merged inside layers
    for layer in range(reduction.policy.layers[0], len(blocks) + 1):
        _first_(blocks[layer - 1], partial(reduction.enter_block, axis))
        own = family.installed_(model, layer - 1)
        own.kept_patches = reduction.kept_patches
        own.backend = AttentionCapture(reduction.sizes, partial(reduction.add_capture, ()), (), reduction.log_sizes)
        attention, mlp = family.attention_and_mlp(model, layer - 1)
        _first_(attention, partial(reduction.enter_attention, layer))
        _first_(attention, reduction.leave_attention, returned=True)
        _first_(mlp, reduction.enter_mlp)
        _first_(mlp, reduction.leave_mlp, returned=True)
    # A pass that a library method starts, e.g. of the backbone alone, ends after the last block.
    _first_(blocks[-1], reduction.leave_blocks, returned=True)


def _attach_pooling_(model: nn.Module, family: Family, reduction: TokenReduction) -> None:
    """Attaches hooks to the model's token pooling, so that pruned tokens do not influence the pooled result."""
    pooler = family.pooler(model)
    if pooler is not None:
        family.pooled_norm(model).register_forward_hook(NormHook(reduction.normalized), with_kwargs=True)
        pooler.register_forward_pre_hook(PoolerHook(reduction.attended), with_kwargs=True)
    elif reduction.shape.layout.pooled != "class":  # "mean" or "max": pruned patches must not count
        family.pooled_norm(model).register_forward_hook(TokenHook(reduction.pooled), with_kwargs=True)


NO_CHECKPOINTS = (
    "gradient checkpointing computes the blocks again in the backward pass, without the state of tokens that are "
    "pruned or merged: switch it off, e.g. model.set_grad_checkpointing(False) of timm or "
    "model.gradient_checkpointing_disable() of transformers."
)


def is_checkpointed(model: nn.Module) -> bool:
    """Returns whether a forward pass of the model would use gradient checkpointing at present."""
    # timm and open_clip use checkpoints in both modes, transformers only in training. The flag is read from the
    # instance's dictionary, where the libraries set it, because looking up a missing attribute is slow.
    return torch.is_grad_enabled() and any(
        vars(part).get("grad_checkpointing") or (part.training and vars(part).get("gradient_checkpointing"))
        for part in model.modules()
    )


def detach_tokens_(model: nn.Module) -> nn.Module:
    """Removes the token policy from a model in place, and returns the model. attnrx attention stays installed."""
    model._modules.pop(TOKENS, None)
    for part in model.modules():
        if isinstance(part, Attention):
            part.kept_patches = None
            if isinstance(part.backend, AttentionCapture):
                part.backend = BACKENDS["auto"]()
                part._forward_hooks.clear()
        for hooks in (part._forward_pre_hooks, part._forward_hooks):
            for key, hook in list(hooks.items()):
                if isinstance(hook, TokenHook) or isinstance(getattr(hook, "__self__", None), PassHook):
                    del hooks[key]
                    for options in (part._forward_pre_hooks_with_kwargs, part._forward_hooks_with_kwargs):
                        options.pop(key, None)
                    part._forward_hooks_always_called.pop(key, None)
    return model


class PassHook:
    """Hooks that run before and after a model's forward pass. They set the blocks after which patches are restored."""

    def __init__(self, reduction: TokenReduction, restored_blocks: Container[int]):
        self.reduction, self.restored_blocks = reduction, restored_blocks

    def enter(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Starts a forward pass.

        Raises:
            NotSupported: Gradient checkpointing is on, or TorchScript's ONNX exporter traces the pass.
        """
        if is_checkpointed(model):
            raise NotSupported(NO_CHECKPOINTS)
        require_no_old_tracer()
        blocks = range(self.reduction.shape.depth) if _wants_states(model, kwargs) else self.restored_blocks
        # A replica that `DataParallel` made has its own predictors.
        self.reduction.enter_pass(blocks, (reduction_of(model) or self.reduction).stages)

    def leave(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if not self.reduction.call.outer:  # the pass did not begin
            return None
        self.reduction.leave_pass()
        is_mean = self.reduction.shape.layout.pooled in ("mean", "max") and not self.restored_blocks
        if not (is_mean and isinstance(output, Mapping) and _wants_states(model, kwargs)):
            return None
        # The classifier must not take the mean over restored patches. So the model runs again without hidden states.
        answer = model(*args, **{**kwargs, "output_hidden_states": False, "return_dict": True})
        changed: Any = output
        for name in {"loss", "logits"} & answer.keys():
            changed[name] = answer[name]
        return changed


def _wants_states(model: nn.Module, options: Mapping[str, Any]) -> bool:
    """Returns whether a call of a transformers model requests the hidden states of all blocks."""
    default = getattr(getattr(model, "config", None), "output_hidden_states", False)
    return bool(options.get("output_hidden_states", default))


class TokenHook:
    """A hook that replaces a module's input or output tokens by `run(tokens)`, unless `run` returns None.

    `by_image` is true because the hook treats the images of a batch independently, so a batch may be split into chunks.
    """

    by_image = True

    def __init__(self, run: Callable[..., Any]):
        self.run = run

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], *outputs: Any) -> Any:
        if outputs:  # some layers of transformers return a tuple
            first, *others = outputs[0] if isinstance(outputs[0], tuple) else outputs
            tokens = self.run(first)
            return tokens if tokens is None or not isinstance(outputs[0], tuple) else (tokens, *others)
        entering = tokens_in(args, kwargs)
        if isinstance(entering, fx.Proxy):
            raise NotSupported(
                "torch.fx traces no model that prunes or merges tokens: which tokens leave depends on the image. Trace "
                "the model before its tokens are pruned."
            )
        tokens = self.run(entering)
        if tokens is None:
            return None
        return with_tokens(args, kwargs, tokens)


class NormHook(TokenHook):
    """A hook on the norm before attention pooling. It calls `run(norm)`, which normalizes the remaining tokens."""

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], *outputs: Any) -> None:
        self.run(module.forward)


class PoolerHook(TokenHook):
    """A hook on attention pooling, which replaces the tokens to pool by the first result of `run(tokens)`.

    The second result of `run` is added to the attention scores, unless it is None.
    """

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], *outputs: Any) -> Any:
        is_latent = not isinstance(module, nn.MultiheadAttention)  # timm's AttentionPoolLatent stores its own query
        entering = args[0] if is_latent else args[1]
        tokens, scores = self.run(entering)
        options = dict(kwargs)
        if scores is not None:
            options |= {"attn_mask": scores[:, None, None]} if is_latent else {"key_padding_mask": scores}
        return ((tokens, *args[1:]) if is_latent else (args[0], tokens, tokens, *args[3:])), options


def _first_(module: nn.Module, run: Callable[[Tensor], Tensor | None], returned: bool = False) -> None:
    """Registers a hook on a module's input (or on its output if `returned`) that runs before all existing hooks."""
    # prepend=True would not work, because torch 2.11 compiles hooks in the order in which they were registered.
    hooks = module._forward_hooks if returned else module._forward_pre_hooks
    later = dict(hooks)
    hooks.clear()
    (module.register_forward_hook if returned else module.register_forward_pre_hook)(TokenHook(run), with_kwargs=True)
    hooks.update(later)


def described_tokens(model: nn.Module) -> dict[str, Any] | None:
    """Returns a model's token policy as JSON-ready values, or None if the model has no policy."""
    reduction = reduction_of(model)
    if reduction is None:
        return None
    return {"policy": to_dict(reduction.policy), "by": reduction.by, "heads": reduction.shape.heads}


def forward_pass(model: nn.Module, restored_blocks: Container[int] | None = None) -> AbstractContextManager[None]:
    """Returns a context manager for one forward pass, whose token statistics are deleted at the end.

    Raises:
        NotSupported: TorchScript's ONNX exporter traces the pass.
    """
    reduction = reduction_of(model)
    if reduction is None:
        return nullcontext()
    require_no_old_tracer()
    return reduction.forward_pass(restored_blocks)


def require_no_old_tracer() -> None:
    """Raises NotSupported if TorchScript's ONNX exporter traces the present pass."""
    if torch.jit.is_tracing() and torch.onnx.is_in_onnx_export():
        # The old exporter has no stable sort, so its files sometimes give other outputs.
        raise NotSupported(
            "torch.onnx.export(dynamo=False) cannot write a model that prunes or merges tokens: use dynamo=True, or "
            "attnrx.export(model, path), which compares the file with the model."
        )


@contextmanager
def recording_tokens(model: nn.Module, tracked: bool = False) -> Iterator[list[TokenRun]]:
    """Yields a list that collects the model's token statistics, one `TokenRun` per forward pass of this thread.

    The list stays empty if the model has no token policy, or if its policy keeps every patch. Batches are not split
    into chunks inside the context. If such contexts are nested, only the innermost one collects statistics. If
    `tracked` is true, each `TokenRun` also records which token represents each patch.
    """
    reduction, runs = reduction_of(model), list[TokenRun]()
    with nullcontext() if reduction is None else reduction.call.setting(runs=runs, tracked=tracked):
        yield runs
