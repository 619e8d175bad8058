"""Layers of transformers that are pre-norm blocks, with one call of the C++ kernel where nothing observes their parts.

Their classes are changed in place, and keep their names, by which transformers finds them.
"""

from typing import Any

from torch import nn
from transformers.models.dinov2 import modeling_dinov2
from transformers.models.dinov2_with_registers import modeling_dinov2_with_registers
from transformers.models.vit import modeling_vit

from attnrx.support.shapes import Float, Tensor, TokenBatch
from attnrx.vit.models.adopted import BlockParts, fused_parts
from attnrx.vit.models.fused_block import may_be_fused

AttentionMask = Float[Tensor, "*batch tokens tokens"] | None
DINOV2 = BlockParts(
    "attention", ("norm1", "norm2"), "mlp", ("layer_scale1", "layer_scale2"), "lambda1",
    (modeling_dinov2.Dinov2LayerScale, modeling_dinov2_with_registers.Dinov2WithRegistersLayerScale), ("drop_path",),
)  # fmt: skip
VIT = BlockParts("attention", ("layernorm_before", "layernorm_after"), "mlp", others=("dropout",))


class _FusedLayer(nn.Module):
    parts: BlockParts

    def forward(self, hidden_states: TokenBatch, attention_mask: AttentionMask = None, **options: Any) -> TokenBatch:
        # Models pass what they were asked for, e.g. output_attentions=False.
        is_plain = attention_mask is None and all(each is None or each is False for each in options.values())
        fused = fused_parts(self, hidden_states, self.parts) if is_plain and may_be_fused(hidden_states) else None
        return super().forward(hidden_states, attention_mask, **options) if fused is None else fused


class Dinov2Layer(_FusedLayer, modeling_dinov2.Dinov2Layer):
    """The layer of DINOv2."""

    parts = DINOV2


class Dinov2WithRegistersLayer(_FusedLayer, modeling_dinov2_with_registers.Dinov2WithRegistersLayer):
    """The layer of DINOv2 with register tokens."""

    parts = DINOV2


class ViTLayer(_FusedLayer, modeling_vit.ViTLayer):
    """The layer of ViT."""

    parts = VIT


FUSED = {each.__mro__[2]: each for each in (Dinov2Layer, Dinov2WithRegistersLayer, ViTLayer)}


def fuse_(layer: nn.Module) -> None:
    """Changes the class of a layer, if it is one of these of transformers."""
    layer.__class__ = FUSED.get(type(layer), type(layer))
