"""Finds out what kind of outputs a user's module returns: logits, probabilities, an embedding or numbers.

If the module's configuration states a task, the kind follows from the task. Otherwise, the kind follows from the last
operation of a forward pass, ignoring views, additions and multiplications after it (`operation_behind`). A sigmoid
returns label probabilities, and a linear map outside the blocks returns logits. Outputs with norm 1 are embeddings.
Modules that return class probabilities are refused.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from attnrx.support.errors import NotSupported
from attnrx.support.modules import evaluating, tensors_of
from attnrx.support.shapes import Tensor
from attnrx.vit.models.libraries.huggingface_family import PROBLEMS

# Operations to skip when searching for the one that computed the numbers: selections and copies, then sums and factors.
CHOICES = frozenset(
    "view _unsafe_view reshape slice select squeeze unsqueeze expand alias detach clone _to_copy copy_ index "
    "index_select gather split split_with_sizes unbind chunk narrow flatten cat stack permute transpose t".split()
)
FACTORS = frozenset("mul mul_ div div_ add add_ sub sub_ neg rsub".split())
LINEAR = frozenset("addmm mm linear bmm baddbmm mkldnn_linear".split())


class Made(NamedTuple):
    """The operation that computed a tensor, the size of the tensor's last axis, and the operation before this one."""

    operation: str
    width: int
    source: "Made | None"


class _Producers(TorchDispatchMode):
    """Records which operation computed each tensor. A record lives as long as its tensor."""

    def __init__(self):
        super().__init__()
        self.made = WeakTensorKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        given = (each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor) and each in self.made)
        source = self.made[first] if (first := next(given, None)) is not None else None
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, Tensor):
                width = tensor.shape[-1] if tensor.ndim else 1
                self.made[tensor] = Made(func.overloadpacket.__name__, width, source)
        return outputs


def operation_behind(model: nn.Module, run: Callable[[], Any]) -> Made | None:
    """Returns the operation that computed the first output of `run`.

    Selections, copies, additions and multiplications after this operation are ignored.
    """
    with evaluating((model,)), _Producers() as producers:
        outputs = tensors_of(run())
    made = producers.made.get(next(iter(outputs.values())))
    while made is not None and made.operation in CHOICES | FACTORS:
        made = made.source
    return made


def kind_of_outputs(
    model: nn.Module, run: Callable[[], Any], tensors: Mapping[str, Tensor], heads: Sequence[nn.Linear], name: str
) -> str:
    """Returns the name of the `OutputKind` that describes a module's outputs.

    Args:
        model: The module whose outputs are classified.
        run: A function that calls the module.
        tensors: The module's outputs for two or more images.
        heads: The module's linear maps outside of its blocks.
        name: The name of the module in messages.

    Raises:
        NotSupported: The module returns probabilities of classes.
    """
    if len(tensors) > 1:
        return "several"
    (tensor,) = tensors.values()
    if tensor.ndim > 2:
        return "map"
    rows = tensor.unsqueeze(-1).flatten(1)
    stated = PROBLEMS.get(getattr(getattr(model, "config", None), "problem_type", None) or "")
    if stated is not None:
        return stated
    ones, width = torch.ones(len(rows)).to(rows), rows.shape[1]
    made = operation_behind(model, run)
    operation = "" if made is None else made.operation.strip("_")
    sums_to_one = width > 1 and bool((rows >= 0).all()) and torch.allclose(rows.sum(1), ones, atol=1e-3)
    if operation in ("softmax", "safe_softmax") or sums_to_one:
        raise NotSupported(
            f"{name} returns probabilities: outputs are compared as logits. Remove the softmax at its end."
        )
    if operation in ("sigmoid", "special_expit"):
        return "label_probabilities"
    if operation == "log_softmax":
        return "logits"
    if width > 1 and torch.allclose(rows.norm(dim=1), ones, atol=1e-3):
        return "embedding"
    linear_width = made.width if made is not None and made.operation in LINEAR else None
    if any(head.out_features == linear_width for head in heads):
        return "binary_logit" if width == 1 else "logits"
    return "regression" if width == 1 else "embedding"
