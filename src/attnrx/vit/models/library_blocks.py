"""Pre-norm blocks of timm and transformers, with one call of a kernel where nothing observes their parts."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import nn

from attnrx.support.shapes import TokenBatch
from attnrx.vit.models.adopted import Adapter
from attnrx.vit.models.fused_block import children, fused_block, is_idle, may_be_fused
from attnrx.vit.models.substitute import empty_module


@dataclass(frozen=True)
class BlockParts:
    """The names of the parts of a pre-norm block: the attention (an `Adapter`), the norms before attention and MLP, the
    MLP, and the modules that scale both branches. `others` change nothing in evaluation mode.
    """

    attention: str
    norms: tuple[str, str]
    scales: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    mlp: str = "mlp"


DINOV2 = BlockParts("attention", ("norm1", "norm2"), ("layer_scale1", "layer_scale2"), ("drop_path",))
# By the names of their classes, so that no library is imported.
BLOCKS: Mapping[str, BlockParts] = {
    "timm.models.vision_transformer.Block": BlockParts(
        "attn", ("norm1", "norm2"), ("ls1", "ls2"), ("drop_path1", "drop_path2")
    ),
    "transformers.models.vit.modeling_vit.ViTLayer": BlockParts(
        "attention", ("layernorm_before", "layernorm_after"), others=("dropout",)
    ),
    "transformers.models.dinov2.modeling_dinov2.Dinov2Layer": DINOV2,
    "transformers.models.dinov2_with_registers.modeling_dinov2_with_registers.Dinov2WithRegistersLayer": DINOV2,
}


class FusedBlock(nn.Module):
    """The base, before the class of the library, of the classes that `fuse_` gives to blocks."""

    names: BlockParts

    def forward(self, *args: Any, **options: Any) -> Any:
        tokens: Any = args[0] if args else options["hidden_states"]
        # Models pass options of their own, e.g. is_causal=False; a mask is not for the kernel.
        others = (*args, *options.values())
        is_plain = all(each is None or each is False or each is tokens for each in others)
        fused = fused_parts(self, tokens, self.names) if is_plain and may_be_fused(tokens) else None
        return super().forward(*args, **options) if fused is None else fused

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _empty_block, (type(self).__bases__[1],), self.__getstate__()


@lru_cache
def _fused_class(kind: type[nn.Module]) -> type[nn.Module]:
    # Of the same name, by which transformers finds its blocks.
    names = {"names": BLOCKS[_name(kind)], "__module__": kind.__module__, "__doc__": kind.__doc__}
    return type(kind.__name__, (FusedBlock, kind), names)


def _empty_block(kind: type[nn.Module]) -> nn.Module:
    return empty_module(_fused_class(kind))


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__name__}"


def fuse_(block: nn.Module) -> None:
    """Changes the class of a block in place, if it is one of BLOCKS; its parts, parameters and hooks stay."""
    if _name(type(block)) in BLOCKS and not isinstance(block, FusedBlock):
        block.__class__ = _fused_class(type(block))


@lru_cache
def _is_scale(kind: type) -> bool:
    """Whether modules of a class multiply by their one parameter, or change nothing."""
    is_of_library = _name(kind).startswith(("timm.layers.", "transformers.models.dinov2"))
    return kind is nn.Identity or (is_of_library and kind.__name__.endswith("LayerScale"))


def fused_parts(block: nn.Module, tokens: TokenBatch, names: BlockParts) -> TokenBatch | None:
    """Returns the output of a block by `fused_block`; None where its parts have to be called one by one."""
    # In the dictionary: `nn.Module.__getattr__` takes longer than all comparisons here.
    parts = children(block)
    adapter, scales = parts[names.attention], [parts[name] for name in names.scales]
    if not isinstance(adapter, Adapter) or not is_idle(adapter):
        return None
    if not all(_is_scale(type(scale)) for scale in scales):
        return None
    first, second = [next(iter(scale._parameters.values()), None) for scale in scales] or (None, None)
    others = (*scales, *[parts[name] for name in names.others])
    norms, attention = (parts[names.norms[0]], parts[names.norms[1]]), children(adapter)["attention"]
    # In the last block `tokens` may be the first ones of all.
    entered = tokens if adapter.call.entered is None else adapter.call.entered[0]
    fused = fused_block(entered, norms, attention, parts[names.mlp], (first, second), others, tokens.shape[1])
    if fused is not None:
        adapter.call.entered = None
    return fused
