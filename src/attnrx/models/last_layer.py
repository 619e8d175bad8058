"""The last-layer class-token shortcut: with a class-token head the last block computes only the class token."""

from typing import Any

from torch import nn

from attnrx.attention import Attention
from attnrx.shapes import Float, Tensor


class LastLayer:
    """A hook before the last block: only the tokens before the patches pass through it, and they attend to all tokens.

    The logits do not change. The shortcut is active only while `at_work` is True, which the model sets during its
    forward pass. The MACs of a model (`attnrx.costs`) count all tokens, as papers do.
    """

    by_image = True

    def __init__(self, block: nn.Module, attention: str, norm: str | None, after: nn.Module, prefix: int):
        """Registers the hook.

        `attention` and `norm` are the paths, inside the block, of its adapter and of the norm before it; `after` is the
        norm after the block, `prefix` the number of tokens before the patches.
        """
        self.block, self.attention, self.norm, self.after, self.prefix = block, attention, norm, after, prefix
        self.at_work = False
        block.register_forward_pre_hook(self, with_kwargs=True)

    @property
    def watched(self) -> bool:
        """Whether the patch tokens of the last block are needed: for training, or by a hook."""
        return any(map(_is_observed, (*self.block.modules(), self.after)))

    def __call__(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Passes the tokens before the patches to the block, and all tokens to the attention as key/value tokens."""
        tokens = args[0] if args else kwargs["hidden_states"]
        adapter: Any = block.get_submodule(self.attention)
        if not (self.at_work and _supports_fewer_queries(adapter.attention, tokens)):
            return args, kwargs
        adapter.key_value_tokens = tokens if self.norm is None else block.get_submodule(self.norm)(tokens)
        queries = tokens[:, : self.prefix]
        return ((queries, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": queries})


def last_layer_of(model: nn.Module) -> LastLayer | None:
    """Returns the shortcut of a model; None where it has none."""
    found = getattr(model, "last", None)
    return found if isinstance(found, LastLayer) else None


def _is_observed(module: nn.Module) -> bool:
    if module.training or module._forward_hooks:
        return True
    return not all(getattr(hook, "by_image", False) for hook in module._forward_pre_hooks.values())


def _supports_fewer_queries(attention: Attention, tokens: Float[Tensor, "batch tokens width"]) -> bool:
    """Returns whether the backend supports fewer queries than keys; a head of rank 0 has no backend."""
    return all(attention.spec.ranks or (0,)) and attention.plan(tokens).backend.takes_few_queries
