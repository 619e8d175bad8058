"""Attaches a token policy to a model: hooks before its layers, captures of its attention, description and costs."""

from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from attnrx.support.errors import InvalidInput, NotSupported
from attnrx.support.records import to_dict
from attnrx.support.shapes import ImageBatch, Tensor
from attnrx.vit.attention import AttentionCapture, capture_uniform
from attnrx.vit.models.family import Family
from attnrx.vit.models.observation_hooks import blocks_of, evaluating
from attnrx.vit.models.substitute import Substitute
from attnrx.vit.models.token_reduction import TokenReduction, TokenRun, reduction_of
from attnrx.vit.tokens import TokenPolicy


def attach_tokens_(
    model: nn.Module, family: Family, policy: TokenPolicy, by: str = "compress", heads: int | None = None
) -> TokenReduction:
    """Attaches a policy to the model, in place, and returns the reduction; its predictors, if any, are fresh.

    Args:
        model: The model.
        family: Its family.
        policy: The reducer, the layers of its stages and the numbers of tokens.
        by: "compress" removes tokens, "mask" keeps every shape.
        heads: The number of heads of the original model, where some may have been removed from every layer.

    Raises:
        InvalidInput: The model has a policy already, or the policy does not fit its layers.
        NotSupported: The model has no class token or no pooling that the policy needs.
    """
    layers = family.attention(model)
    if reduction_of(model) is not None:
        raise InvalidInput("this model already has a token policy; attach a policy to the original.")
    shape = family.token_shape(model, heads)
    layout = shape.layout
    policy = policy.on(layout, len(layers))
    weight = next(model.parameters())
    reduction = TokenReduction(policy, shape, by).to(weight.device, weight.dtype)
    model.tokens = reduction
    if policy.counts(layout.patches)[-1] == layout.patches:
        return reduction.train(model.training)  # no token is ever pruned: the model stays bit-identical
    # Hooks, not subclasses: the policy is attached to the blocks of any library, and their own forward methods run on
    # the tokens that are left.
    stages = {layer - 1: stage for stage, layer in enumerate(policy.layers)}  # layers count from 1
    for index, block in enumerate(blocks_of(model, family)):
        # The input of a block is the output of the one before.
        adds = policy.reducer.every_layer == "tokens" and 0 < index < policy.layers[-1]
        _first_(block, partial(reduction.enter, stages.get(index), adds))
        _first_(block, partial(reduction.leave, index), returned=True)
    # Methods of the library that are called on the inner model return all patches; the forward pass of attnrx switches
    # the restoration off (`Adopted.forward_pass`).
    if isinstance(model, Substitute):
        reduction.restored_blocks = range(len(layers))
    _first_(family.patch_embedding(model), reduction.begin)
    for index, layer in enumerate(layers, 1):
        layer.kept_patches = reduction.kept_patches
        # A stage runs on the input of a layer, so it needs what is captured in the layer before.
        decides = index + 1 in policy.layers
        quantities = set(policy.reducer.needs) if decides else set()
        if index < policy.layers[-1] and policy.reducer.every_layer in ("attention", "class_attention"):
            quantities.add(policy.reducer.every_layer)
        # Before the first stage all sizes are 1, and any backend computes the layer.
        uses_sizes = reduction.counts_sizes or policy.reducer.learned
        if quantities or (uses_sizes and index >= policy.layers[0]):
            stored = layer.spec.heads if layer.spec.attends else ()
            receive = partial(reduction.add_capture, stored, decides=decides)
            wanted = tuple(sorted(quantities))
            layer.backend = AttentionCapture(reduction.sizes, receive, wanted, reduction.log_sizes)
            if quantities and not stored:
                layer.register_forward_hook(partial(capture_uniform, layer.backend))
    if layout.pooled != "class":  # "mean" or "max": pruned patches must not count
        family.pooled_norm(model).register_forward_hook(TokenHook(reduction.pooled), with_kwargs=True)
    return reduction.train(model.training)


class TokenHook:
    """Replaces the tokens that enter a module, or those that it returns, by `run(tokens)`, unless that is None.

    It treats the images of a batch independently, so that a batch may be chunked.
    """

    by_image = True

    def __init__(self, run: Callable[[Tensor], Tensor | None]):
        self.run = run

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], *outputs: Any) -> Any:
        if outputs:  # some layers of transformers return a tuple
            first, *others = outputs[0] if isinstance(outputs[0], tuple) else outputs
            tokens = self.run(first)
            return tokens if tokens is None or not isinstance(outputs[0], tuple) else (tokens, *others)
        # timm passes tokens by position, transformers by name.
        tokens = self.run(args[0] if args else kwargs["hidden_states"])
        if tokens is None:
            return None
        return ((tokens, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": tokens})


def _first_(module: nn.Module, run: Callable[[Tensor], Tensor | None], returned: bool = False) -> None:
    """Registers a hook on the module's input, or on what it returns, that runs before the existing ones."""
    # Not prepend=True: torch 2.11 compiles hooks in the order of their insertion, not in that of the OrderedDict.
    hooks = module._forward_hooks if returned else module._forward_pre_hooks
    later = dict(hooks)
    hooks.clear()
    (module.register_forward_hook if returned else module.register_forward_pre_hook)(TokenHook(run), with_kwargs=True)
    hooks.update(later)


def described_tokens(model: nn.Module) -> dict[str, Any] | None:
    """Returns the policy of a model as JSON-ready values; None where it has none."""
    reduction = reduction_of(model)
    if reduction is None:
        return None
    return {"policy": to_dict(reduction.policy), "by": reduction.by, "heads": reduction.shape.heads}


def forward_pass(model: nn.Module, restored_blocks: Container[int] | None = None) -> AbstractContextManager[None]:
    """Returns a context for one forward pass, at whose end the statistics of the model's tokens are removed.

    Raises:
        NotSupported: The pass is traced by the exporter to ONNX of TorchScript.
    """
    reduction = reduction_of(model)
    if reduction is None:
        return nullcontext()
    if torch.jit.is_tracing() and torch.onnx.is_in_onnx_export():
        # It has no stable sort, and writes some files whose outputs differ.
        raise NotSupported(
            "torch.onnx.export(dynamo=False) cannot write a model that prunes or merges tokens: use dynamo=True, or "
            "attnrx.export(model, path), which compares the file with the model."
        )
    return reduction.forward_pass(restored_blocks)


@contextmanager
def recording_tokens(model: nn.Module, tracked: bool = False) -> Iterator[list[TokenRun]]:
    """Collects the statistics of the model's tokens in the context, one run per forward pass of this thread.

    The list stays empty where the model has no token policy, or one that keeps every patch. A batch is not chunked. Of
    nested contexts the innermost one collects. With `tracked` runs state which token represents each patch.
    """
    reduction, runs = reduction_of(model), list[TokenRun]()
    with nullcontext() if reduction is None else reduction.call.setting(runs=runs, tracked=tracked):
        yield runs


def token_run(model: nn.Module, images: ImageBatch, tracked: bool = False) -> TokenRun:
    """Runs the model on the images in evaluation mode, and returns the statistics of its tokens.

    With `tracked` they state which token represents each patch after every stage (`TokenRun.representatives`).
    """
    with evaluating((model,)), recording_tokens(model, tracked) as runs:
        model(images)
    return runs[-1] if runs else TokenRun()
