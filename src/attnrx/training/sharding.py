"""Weights in parts: every process keeps its share of every tensor (FSDP2), and they are whole where one needs them so.

The weights are gathered for a step, block by block, and stay so until all its gradients are known: what a loss reads
off the model is an ordinary tensor, which lasts however often the model runs in a step. Between steps every process
holds its part of weights, gradients, optimizer state and running mean. Accelerate starts FSDP on accelerators only;
PyTorch's `fully_shard` under its processes runs anywhere.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from attnrx.models import block_names, family_of
from attnrx.shapes import Tensor

if TYPE_CHECKING:
    from accelerate import Accelerator


def shard_(model: nn.Module, accelerator: "Accelerator") -> nn.Module:
    """Shares the weights of every block, and then those of the rest, among all processes."""
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    for name in block_names(model, family_of(model)):
        fully_shard(model.get_submodule(name), mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    for part in _parts(model):
        part.set_reshard_after_backward(False)
    return model


def release_(model: nn.Module) -> None:
    """Lets go of the weights that were gathered: every process is left with its part. A whole model stays as it is."""
    for part in _parts(model):
        part.reshard()


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Lets every process have whole weights for a while, so that each may run the model as often as it likes.

    All processes enter and leave together; nothing may change the weights meanwhile. A whole model is left as it is.
    """
    parts = _parts(model)
    for part in parts:
        part.unshard()
    # Gathering fills the same memory again without counting it as a change, which what is kept of weights goes by.
    torch.autograd.graph.increment_version([parameter for parameter in model.parameters() if parts])
    try:
        yield
    finally:
        release_(model)


def collecting(model: Any, accelerator: "Accelerator") -> AbstractContextManager[None]:
    """Keeps the gradients of a part of a step to each process, until the last part adds them up."""
    return _apart(model) if isinstance(model, FSDPModule) else accelerator.no_sync(model)


@contextmanager
def _apart(model: FSDPModule) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def own(tensor: Tensor) -> Tensor:
    """Returns the part that this process holds; a whole tensor is its own part. Changes of the part are changes of
    it."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Returns a tensor put together from all processes, which all have to ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def all_whole(tensors: Mapping[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """Returns tensors put together one by one, on the CPU where they were in parts; to a process that does not `keep`
    them, nothing.
    """
    found = {}
    for name, tensor in tensors.items():
        together = whole(tensor.detach())
        if keep:
            found[name] = together.cpu() if isinstance(tensor, DTensor) else together
    return found


def part_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Returns a whole tensor, which every process has, in the parts and on the device of another of its shape."""
    tensor = tensor.to(like.device)
    if not isinstance(like, DTensor) or tensor.shape != like.shape:
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


@torch.no_grad()
def put_(target: Tensor, tensor: Tensor) -> None:
    """Copies a whole tensor, which every process has, into another that may be in parts."""
    own(target).copy_(own(part_like(tensor, target)))


def _parts(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
