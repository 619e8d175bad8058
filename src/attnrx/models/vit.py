"""The Vision Transformer of attnrx: the compact SVDA-ViT of the paper, and the same model with dense attention."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from attnrx.errors import InvalidInput
from attnrx.models.chunked_forward import chunked_forward
from attnrx.models.transformer import Layer, Transformer, TransformerConfig
from attnrx.shapes import Float, Tensor
from attnrx.spec import AttentionSpec


@dataclass(frozen=True)
class ViTConfig(TransformerConfig):
    """The shape of the model and its input format; the defaults are those of the paper for CIFAR-10."""

    image_size: int = 32
    patch_size: int = 4
    channels: int = 3
    classes: int = 10
    mlp_ratio: float = 4.0
    mean: tuple[float, ...] = field(default=(0.5, 0.5, 0.5))
    std: tuple[float, ...] = field(default=(0.5, 0.5, 0.5))
    mlp_ranks: tuple[tuple[int | None, int | None], ...] = ()

    def __post_init__(self):
        super().__post_init__()
        if self.width % 4:
            raise InvalidInput(f"width {self.width} must be a multiple of 4 for two-dimensional sine-cosine positions.")

    @classmethod
    def uniform(
        cls, form: str = "svda", *, width: int = 256, depth: int = 4, heads: int = 4, **facts: Any
    ) -> "ViTConfig":
        """Returns the uncompressed model of `depth` equal layers.

        Depth, heads, width and patch size default to those of the SVDA paper (Table 4). The paper does not state the
        MLP width: four times the model width reproduces its printed savings.
        """
        channels = facts.get("channels", 3)
        facts.setdefault("mean", (0.5,) * channels)
        facts.setdefault("std", (0.5,) * channels)
        return cls(attention=(AttentionSpec.full(form, width, heads),) * depth, **facts)

    @property
    def tokens(self) -> int:
        """Tokens of an image: its patches; there is no class token."""
        return self.patches


class VisionTransformer(Transformer[ViTConfig]):
    """Patches, fixed sine-cosine position embeddings, layers, mean pooling, linear classifier; no class token."""

    positions: Tensor

    def __init__(self, config: ViTConfig):
        super().__init__(config)
        self.patches = nn.Conv2d(config.channels, config.width, config.patch_size, config.patch_size)
        # On the CPU even when the module is built on the meta device: positions are computed, not loaded.
        positions = sincos_positions(config.image_size // config.patch_size, config.width)
        self.register_buffer("positions", positions, persistent=False)
        self.layers = nn.ModuleList(
            Layer(spec, config.hidden, config.mlp_rank(index)) for index, spec in enumerate(config.attention)
        )
        self.norm = nn.LayerNorm(config.width)
        self.classifier = nn.Linear(config.width, config.classes)

    def forward(self, images: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch classes"]:
        """Returns the logits."""
        self.require_images(images)
        return chunked_forward(self, self.logits, images, self.config.patches * self.config.hidden)

    def logits(self, images: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch classes"]:
        """Returns the logits of images of the right shape."""
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        tokens = tokens + self.positions.to(tokens.dtype)
        for layer in self.layers:
            tokens = layer(tokens)
        return self.classifier(self.norm(tokens).mean(1))


def sincos_positions(side: int, width: int) -> Float[Tensor, "tokens width"]:
    """Returns fixed two-dimensional sine-cosine position embeddings.

    A quarter of the width each holds the sine and the cosine of row and column.
    """
    frequencies = torch.logspace(0, -1, width // 4 + 1, base=10_000.0, device="cpu", dtype=torch.float64)[:-1]
    angles = torch.arange(side, device="cpu", dtype=torch.float64)[:, None] * frequencies
    row = angles[:, None].expand(side, side, -1)
    column = angles[None].expand(side, side, -1)
    table = torch.cat([row.sin(), row.cos(), column.sin(), column.cos()], dim=-1)
    return table.flatten(0, 1).to(torch.get_default_dtype())
