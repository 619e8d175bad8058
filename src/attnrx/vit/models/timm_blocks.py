"""The block of timm's Vision Transformers, with one call of the C++ kernel where nothing observes its parts."""

from timm.layers import LayerScale
from timm.models import vision_transformer
from torch import nn

from attnrx.support.shapes import Float, Tensor, TokenBatch
from attnrx.vit.models.adopted import BlockParts, fused_parts
from attnrx.vit.models.fused_block import may_be_fused

AttentionMask = Float[Tensor, "*batch tokens tokens"] | None
PARTS = BlockParts(
    "attn", ("norm1", "norm2"), "mlp", ("ls1", "ls2"), "gamma", (LayerScale, nn.Identity), ("drop_path1", "drop_path2")
)


class Block(vision_transformer.Block):
    """timm's block; its class is changed in place, so its parts, parameters and hooks are those of timm."""

    def forward(self, x: TokenBatch, attn_mask: AttentionMask = None, is_causal: bool = False) -> TokenBatch:
        fused = None if attn_mask is not None or is_causal or not may_be_fused(x) else fused_parts(self, x, PARTS)
        return super().forward(x, attn_mask, is_causal) if fused is None else fused


def fuse_(block: nn.Module) -> None:
    """Changes the class of a block, if it is timm's own."""
    if type(block) is vision_transformer.Block:
        block.__class__ = Block
