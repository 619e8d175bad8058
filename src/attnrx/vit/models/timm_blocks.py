"""The block of timm's Vision Transformers, with one call of the C++ kernel where nothing observes its parts."""

from timm.layers import LayerScale
from timm.models import vision_transformer
from torch import nn

from attnrx.support.shapes import Float, Tensor, TokenBatch
from attnrx.vit.models.adopted import Adapter
from attnrx.vit.models.fused_block import children, fused_block, is_idle, may_be_fused

AttentionMask = Float[Tensor, "*batch tokens tokens"] | None


class Block(vision_transformer.Block):
    """timm's block; its class is changed in place, so its parts, parameters and hooks are those of timm."""

    def forward(self, x: TokenBatch, attn_mask: AttentionMask = None, is_causal: bool = False) -> TokenBatch:
        fused = None if attn_mask is not None or is_causal or not may_be_fused(x) else self._fused(x)
        return super().forward(x, attn_mask, is_causal) if fused is None else fused

    def _fused(self, tokens: TokenBatch) -> TokenBatch | None:
        # In the dictionary: `nn.Module.__getattr__` takes longer than all comparisons here.
        parts = children(self)
        adapter, scales = parts["attn"], (parts["ls1"], parts["ls2"])
        if not isinstance(adapter, Adapter) or not is_idle(adapter):
            return None
        if any(type(scale) not in (LayerScale, nn.Identity) for scale in scales):
            return None
        first, second = (scale._parameters.get("gamma") for scale in scales)
        others = (*scales, parts["drop_path1"], parts["drop_path2"])
        norms, attention = (parts["norm1"], parts["norm2"]), children(adapter)["attention"]
        # In the last block `tokens` may be the first ones of all.
        entered = tokens if adapter.call.entered is None else adapter.call.entered[0]
        fused = fused_block(entered, norms, attention, parts["mlp"], (first, second), others, tokens.shape[1])
        if fused is not None:
            adapter.call.entered = None
        return fused


def fuse_(block: nn.Module) -> None:
    """Changes the class of a block, if it is timm's own."""
    if type(block) is vision_transformer.Block:
        block.__class__ = Block
