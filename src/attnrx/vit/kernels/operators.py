"""The C++ kernels as operators of PyTorch, visible to profilers, counters and meta tensors."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from attnrx.support.errors import InvalidInput
from attnrx.support.shapes import Float, Tensor

_library = torch.library.Library("attnrx", "FRAGMENT")


def define(
    schema: str, kernel: Callable[..., Any], empty: Callable[..., Any], operations: Callable[..., int]
) -> Callable[..., Any]:
    """Defines an operator for inference, without autograd, and returns it.

    `kernel` computes it on a CPU. `empty` returns its outputs without data, on "Meta": for counting on meta tensors,
    and for fake tensors of compilers. `operations` counts as PyTorch does, from shapes: two operations per MAC.
    """
    _library.define(schema)
    name = schema.partition("(")[0]
    _library.impl(name, kernel, "CPU")
    _library.impl(name, empty, "Meta")
    operator = getattr(torch.ops.attnrx, name)
    register_flop_formula(operator)(operations)
    return operator.default


def is_observed(tensor: Float[Tensor, "*sizes"]) -> bool:
    """Whether a profiler, a mode of this thread, a transform of functions or the tensor itself sees every operator."""
    return (
        type(tensor) is not Tensor
        or not tensor.is_cpu
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore[reportAttributeAccessIssue]
        or torch.autograd._profiler_enabled()
    )


def require_inference(tensors: Sequence[Tensor | None]) -> None:
    """Checks that a kernel can read tensors of any shapes.

    Raises:
        InvalidInput: A tensor requires gradients, which the kernel would lose, or has no strides.
    """
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.requires_grad and torch.is_grad_enabled():
            raise InvalidInput("a C++ kernel records no gradients, and one of its inputs requires them: use no_grad().")
        if tensor.layout != torch.strided:
            raise InvalidInput(f"a C++ kernel reads dense tensors; {tensor.layout} given: convert it by to_dense().")


def require_fitting(fits: bool, *tensors: Tensor | None) -> None:
    """Raises InvalidInput for tensors, of any shapes, with which a kernel would read out of bounds."""
    if not fits:
        given = ", ".join(f"{each.dtype} {list(each.shape)}" for each in tensors if each is not None)
        raise InvalidInput(f"a C++ kernel cannot read {given}: give float32 tensors on a CPU whose shapes fit.")


def address(tensor: Float[Tensor, "*sizes"] | None) -> int | None:
    """Returns where a contiguous tensor is, as a kernel takes it; None stands for no tensor."""
    return None if tensor is None else tensor.data_ptr()
