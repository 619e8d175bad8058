"""Costs counted on a real model, with which the closed form must agree."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from attnrx.support.errors import InvalidInput
from attnrx.support.shapes import ImageBatch

# torch 2.11 counts fused attention on CUDA only; later versions register the same formula for the CPU.
_aten = torch.ops.aten
flop_registry.setdefault(
    _aten._scaled_dot_product_flash_attention_for_cpu, flop_registry[_aten._scaled_dot_product_flash_attention]
)


def count_params(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def count_product_macs(model: nn.Module, images: ImageBatch) -> int:
    """Counts the MACs per image of every matrix product and convolution of one forward pass.

    Equals `ModelCosts.product_macs` if the attention runs on the eager backend, which pads nothing. A fused kernel that
    this build of torch has no formula for counts as zero.

    Raises:
        InvalidInput: The batch is empty.
    """
    if not len(images):
        raise InvalidInput("counting MACs needs at least one image; the batch is empty.")
    with frozen(model), FlopCounterMode(display=False) as counter:
        model(images)
    return counter.get_total_flops() // 2 // len(images)  # torch counts two operations for one MAC


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Disables gradients, those of the parameters included."""
    # Under no_grad alone torch's counter raises an AssertionError for timm's attention pooling, whose query is a
    # parameter. No copy of the model: its token reduction holds the numbers of tokens of the counted pass.
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        with torch.no_grad():
            yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
