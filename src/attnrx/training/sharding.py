"""Sharded weights (FSDP2): every process holds a shard of every tensor; whole tensors are gathered on demand.

The weights are gathered for a step, block by block, and stay gathered until all gradients are computed: a loss can use
the weights as ordinary tensors, however often the model runs in a step. Between steps every process holds its shard of
weights, gradients, optimizer state and running mean. Accelerate supports FSDP on accelerators only; PyTorch's
`fully_shard` in its processes runs anywhere.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from attnrx.support.shapes import Tensor
from attnrx.vit.models import family_of

if TYPE_CHECKING:
    from accelerate import Accelerator


def shard_(model: nn.Module, accelerator: "Accelerator") -> nn.Module:
    """Shards the weights of every block, and then all others, over all processes."""
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    # Blocks first and then the rest: `fully_shard` takes the parameters that no inner call has taken.
    for name in family_of(model).block_names(model):
        fully_shard(model.get_submodule(name), mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    for part in _parts(model):
        part.set_reshard_after_backward(False)
    return model


def reshard_(model: nn.Module) -> None:
    """Frees gathered weights, so that every process holds its shard only; no effect on a model that is not sharded."""
    for part in _parts(model):
        part.reshard()


@contextmanager
def gathered_weights(model: nn.Module) -> Iterator[None]:
    """Gathers the weights inside the context, so that each process may run the model any number of times.

    All processes must enter and exit together, and the weights must not change inside. No effect on a model that is not
    sharded.
    """
    for part in _parts(model):
        part.unshard()
    try:
        yield
    finally:
        reshard_(model)


def local_shard(tensor: Tensor) -> Tensor:
    """Returns the shard of this process, a view of a tensor (any shape); one that is not sharded is returned itself."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """Returns a tensor of any shape, gathered from all processes; all of them must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gather_tensors(tensors: Mapping[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """Returns tensors gathered one by one, on the CPU if they were sharded; empty in processes without `keep`."""
    whole_tensors = {}
    for name, tensor in tensors.items():
        # One by one and then to the CPU: all at once may not fit beside the shards on a device. Every process takes
        # part, also those that keep nothing.
        gathered = full_tensor(tensor.detach())
        if keep:
            whole_tensors[name] = gathered.cpu() if isinstance(tensor, DTensor) else gathered
    return whole_tensors


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Returns a whole tensor, which every process has, sharded and on the device like `like`, if of the same shape."""
    tensor = tensor.to(like.device)
    # State of another shape, such as the optimizer's count of steps, is not sharded.
    if not isinstance(like, DTensor) or tensor.shape != like.shape:
        return tensor
    # src_data_rank=None: every process has the whole tensor and cuts its own shard, nothing is sent
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


@torch.no_grad()
def copy_whole_(target: Tensor, tensor: Tensor) -> None:
    """Copies a whole tensor, which every process has, into one of its shape that may be sharded."""
    local_shard(target).copy_(local_shard(shard_like(tensor, target)))


def _parts(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
