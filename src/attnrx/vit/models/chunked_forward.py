"""Chunked inference on a CPU: a few images at a time, so that activations stay in reused, cached memory."""

from collections.abc import Callable
from typing import Any

from torch import nn

from attnrx.support.errors import InvalidInput
from attnrx.support.modules import is_traced, joined, mapped
from attnrx.support.shapes import ImageBatch, Tensor
from attnrx.vit.attention import Attention, AttentionContext
from attnrx.vit.models.substitute import is_capturing
from attnrx.vit.models.token_reduction import reduction_of

WARM = 16 * 2**20
"""Bytes of the largest activation that a CPU thread handles at once.

The operating system allocates larger ones anew, page by page, at every operation, and they do not fit the cache: that
takes longer than starting the operations several times. Every product packs its weight anew, which the chunks repeat:
with 8 MiB a ViT-S/14 with a decoder took 4 % longer at batch 8 (docs/results/dense.md).
"""


def chunked_forward(model: nn.Module, run: Callable[[Tensor], Any], images: ImageBatch, largest: int) -> Any:
    """Returns `run(images)`, one tensor or several (`support.modules`), computed in chunks on a CPU where no gradients
    are recorded and no hook needs the whole batch. Every call of `run` is a forward pass of its own, in its context.

    `largest` is the number of elements per image of the largest activation. The model must treat the images of a batch
    independently, as all models do in evaluation mode.
    """
    # Token reducers and some backends need an image: an empty batch has the outputs of a black one, without its row.
    if not (is_traced() or model.training or len(images)):
        return mapped(lambda output: output[:0], run(images.new_zeros(1, *images.shape[1:])))
    context = AttentionContext.of(images.flatten(2))
    if not context.free_on_cpu or largest < 1:
        return run(images)
    chunk_size = max(context.threads * WARM // (largest * images.element_size()), 1)
    reduction = reduction_of(model)
    if (
        len(images) <= chunk_size
        or (reduction is not None and reduction.call.runs is not None)  # the tokens of a whole batch are recorded
        or any(is_watched(part) or (isinstance(part, Attention) and part.backend.watches) for part in model.modules())
    ):
        return run(images)
    # Chunks of equal sizes: a small last one would pack the weights for few images.
    num_chunks = -(-len(images) // chunk_size)
    return joined([run(chunk) for chunk in images.split(-(-len(images) // num_chunks))])


def require_images(images: ImageBatch, expected: tuple[int, int, int], name: str) -> None:
    """Raises InvalidInput for images that are not of the expected shape: channels, height and width."""
    if images.shape[1:] != expected:
        channels, height, width = expected
        size = height if height == width else (height, width)
        raise InvalidInput(
            f"images of shape {tuple(images.shape)}: {name} takes [batch, {channels}, {height}, {width}]. Load the "
            f"data with image_size={size}, or the model for the images: attnrx.load(model, image_size=...)."
        )


def is_watched(module: nn.Module) -> bool:
    """Returns whether a module is in training mode, or has hooks that may need all images and tokens.

    Hooks that treat the images of a batch independently, and take any number of tokens, have the attribute `by_image`.
    """
    if module.training or not (module._forward_hooks or module._forward_pre_hooks):
        return module.training
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return not all(getattr(hook, "by_image", False) or is_capturing(hook) for hook in hooks)
