"""The last-layer class-token shortcut: models whose head reads the class token compute only that in the last block."""

from typing import Any

from torch import nn

from attnrx.attention import Attention
from attnrx.shapes import Float, Tensor


class LastLayer:
    """A hook before the last layer: the tokens before the patches alone go through it, and attend to all.

    That changes no logit. While `at_work` is False, which it is but for the time that the model answers, all tokens go
    through. The MACs of a model (`attnrx.costs`) count all of them, as papers do.
    """

    by_image = True

    def __init__(self, block: nn.Module, attention: str, norm: str | None, after: nn.Module, prefix: int):
        """Registers itself.

        `attention` and `norm` are where the block has its adapter, and what its input passes before that; `after` is
        the norm after the block, `prefix` the number of tokens before the patches.
        """
        self.block, self.attention, self.norm, self.after, self.prefix = block, attention, norm, after, prefix
        self.at_work = False
        block.register_forward_pre_hook(self, with_kwargs=True)

    @property
    def watched(self) -> bool:
        """Whether somebody sees, or trains, what the patches become."""
        return any(map(_watched, (*self.block.modules(), self.after)))

    def __call__(self, block: nn.Module, given: tuple, named: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Sends the tokens before the patches on, and all of them to the attention."""
        tokens = given[0] if given else named["hidden_states"]
        adapter: Any = block.get_submodule(self.attention)
        if not (self.at_work and _takes_few(adapter.attention, tokens)):
            return given, named
        adapter.among = tokens if self.norm is None else block.get_submodule(self.norm)(tokens)
        few = tokens[:, : self.prefix]
        return ((few, *given[1:]), named) if given else (given, {**named, "hidden_states": few})


def last_layer_of(model: nn.Module) -> LastLayer | None:
    """Returns what shortens the last layer of a model; None where nothing does."""
    found = getattr(model, "last", None)
    return found if isinstance(found, LastLayer) else None


def _watched(module: nn.Module) -> bool:
    if module.training or module._forward_hooks:
        return True
    return not all(getattr(hook, "by_image", False) for hook in module._forward_pre_hooks.values())


def _takes_few(attention: Attention, tokens: Float[Tensor, "batch tokens width"]) -> bool:
    """Whether the attention is computed by something that takes fewer queries than keys; a head of rank 0 has none."""
    return all(attention.spec.ranks or (0,)) and attention.plan(tokens).backend.takes_few_queries
