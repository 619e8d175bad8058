"""Whether PyTorch records the operations that run now."""

import torch


def is_recorded() -> bool:
    """Whether operations are recorded: for gradients, by a compiler, or by a trace."""
    return torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.jit.is_tracing()
