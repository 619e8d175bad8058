"""Finds the blocks that a model needs least, by measuring how far its outputs diverge without them."""

from typing import Any

from torch import nn

from attnrx.data import ImageData
from attnrx.data.model_data import images_for
from attnrx.decide.planning.sensitivity import Answers
from attnrx.nouns.prescription import DepthPrescription
from attnrx.support.arguments import COUNT, checked
from attnrx.support.errors import InvalidInput
from attnrx.support.modules import evaluating, random_images
from attnrx.support.progress import track
from attnrx.vit.models import blocks_of, family_of, recording_calls, require_all_tokens
from attnrx.vit.models.boundary.shallower import passing
from attnrx.vit.models.boundary.verbs import verb


@checked(count=COUNT)
@verb
def least_needed_blocks(
    model: nn.Module, images: ImageData, count: int = 1, *, batch_size: int = 32
) -> DepthPrescription:
    """Chooses blocks to remove, one after the other, so that the outputs diverge least after each removal.

    The divergence from the original is measured on all images. No weights are fitted. Pass the result to `prescribe` as
    `{"depth": ...}`.

    Args:
        model: The model, without token pruning or merging.
        images: Images, normalized for the model, in any form that attnrx reads. They need no labels.
        count: The number of blocks to remove. At least one block must remain.
        batch_size: The number of images per forward pass.

    Returns:
        The blocks to remove. The reason for each block states the divergence right after this block was removed.

    Raises:
        InvalidInput: The model has no more than `count` blocks.
        NotSupported: The model prunes or merges tokens.

    Examples:
        >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=3, num_classes=10)
        >>> model = rx.load(vit)
        >>> depth = rx.planning.least_needed_blocks(model, torch.randn(16, 3, 32, 32))
        >>> small = rx.realize(model, rx.prescribe(model, {"depth": depth}))
        >>> len(small.blocks)
        2
    """
    require_all_tokens(model, "choose blocks to remove of")
    fixed = images_for(model, images, "images")
    blocks = blocks_of(model, family_of(model))
    if count >= len(blocks):
        raise InvalidInput(f"count={count} of a model of {len(blocks)} blocks: remove 1 to {len(blocks) - 1}.")
    with evaluating((model,)), recording_calls(blocks, lambda call: (call.module, call.output)) as calls:
        model(random_images(model, family_of(model).input_shape(model)))
    outputs: dict[nn.Module, Any] = dict(calls)
    answers = Answers.of(model, fixed, batch_size)
    divergence_without: dict[int, float] = {}
    for _ in track(range(count), "choosing blocks"):
        found: dict[int, float] = {}
        for index in (index for index in range(len(blocks)) if index not in divergence_without):
            removed = (*divergence_without, index)
            with passing({blocks[each]: outputs[blocks[each]] for each in removed}):
                found[index] = answers.measure(model).mean
        best = min(found, key=lambda index: found[index])
        divergence_without[best] = found[best]
    unit = f" {answers.kind.unit}".rstrip()
    ordered, order = sorted(divergence_without), [*divergence_without]
    reasons = tuple(
        f"block {index + 1}, removed {order.index(index) + 1} of {count}: "
        f"divergence {divergence_without[index]:.3g}{unit} then, on {len(answers)} images"
        for index in ordered
    )
    return DepthPrescription(tuple(index + 1 for index in ordered), reasons)
