"""Costs counted on a real model, with which the closed form must agree."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from attnrx.support.errors import InvalidInput, NotSupported
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

    Equals `ModelCosts.product_macs` if the attention runs on the eager backend, which pads nothing. Raises NotSupported
    for a fused kernel that this build of torch cannot count.

    Raises:
        InvalidInput: The batch is empty.
    """
    if not len(images):
        raise InvalidInput("counting MACs needs at least one image; the batch is empty.")
    with frozen(model), FlopCounterMode(display=False) as counter, _Operations() as operations:
        model(images)
    counts = counter.get_flop_counts()["Global"]
    names = {operation: str(operation) for operation in operations.packets if not counts.get(operation)}
    # A fused kernel without a formula counts as zero: the total would be too small without a warning.
    uncounted_kernels = sorted(name for name in names.values() if "scaled_dot_product" in name)
    if uncounted_kernels:
        raise NotSupported(
            f"torch {torch.__version__} does not count the operations of {', '.join(uncounted_kernels)}: "
            "run the attention on the eager backend."
        )
    return sum(counts.values()) // 2 // len(images)  # torch counts two operations for one MAC


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


class _Operations(TorchDispatchMode):
    """Records the names of the operations that ran."""

    def __init__(self):
        super().__init__()
        self.packets: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.packets.add(func.overloadpacket)
        return func(*args, **(kwargs or {}))
