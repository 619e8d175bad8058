"""Our own Vision Transformer: the compact SVDA-ViT of the paper, and the same model with dense attention."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from attnrx.attention import Attention
from attnrx.errors import InvalidInput
from attnrx.models.low_rank_linear import linear_of_rank
from attnrx.shapes import Float, Tensor
from attnrx.spec import AttentionSpec


@dataclass(frozen=True)
class ViTConfig:
    """The shape of the model and the facts of its input.

    `attention` holds one spec per layer, so a compressed model is described as fully as an original one; `mlp_ranks`
    likewise holds the ranks of the two maps of every MLP (None: one matrix), or nothing. `mean` and `std` say how the
    images must be normalized; they are facts that the model was trained with.
    """

    attention: tuple[AttentionSpec, ...]
    image_size: int = 32
    patch_size: int = 4
    channels: int = 3
    classes: int = 10
    mlp_ratio: float = 4.0
    mean: tuple[float, ...] = field(default=(0.5, 0.5, 0.5))
    std: tuple[float, ...] = field(default=(0.5, 0.5, 0.5))
    mlp_ranks: tuple[tuple[int | None, int | None], ...] = ()

    def __post_init__(self):
        if not self.attention:
            raise InvalidInput("a ViT needs at least one layer; give one AttentionSpec per layer.")
        if self.image_size % self.patch_size:
            raise InvalidInput(f"patch_size {self.patch_size} does not divide image_size {self.image_size}.")
        if self.mlp_ranks and len(self.mlp_ranks) != self.depth:
            raise InvalidInput(f"{len(self.mlp_ranks)} pairs of MLP ranks for {self.depth} layers: give one each.")
        if self.width % 4:
            raise InvalidInput(f"width {self.width} must be a multiple of 4 for two-dimensional sine-cosine positions.")
        if len(self.mean) != self.channels or len(self.std) != self.channels:
            raise InvalidInput(
                f"{len(self.mean)} means and {len(self.std)} stds for {self.channels} channels: give one each."
            )

    @classmethod
    def uniform(
        cls, form: str = "svda", *, width: int = 256, depth: int = 4, heads: int = 4, **facts: Any
    ) -> "ViTConfig":
        """The uncompressed model of `depth` equal layers; the defaults are the paper's compact one (Table 4)."""
        channels = facts.get("channels", 3)
        facts.setdefault("mean", (0.5,) * channels)
        facts.setdefault("std", (0.5,) * channels)
        return cls(attention=(AttentionSpec.full(form, width, heads),) * depth, **facts)

    @property
    def width(self) -> int:
        """Features of a token."""
        return self.attention[0].width

    @property
    def depth(self) -> int:
        """Number of layers."""
        return len(self.attention)

    @property
    def hidden(self) -> int:
        """Features inside the MLP."""
        return int(self.width * self.mlp_ratio)

    @property
    def tokens(self) -> int:
        """Patches of an image; there is no class token."""
        return (self.image_size // self.patch_size) ** 2

    def mlp_rank(self, layer: int) -> tuple[int | None, int | None]:
        """The ranks of the two maps of one layer's MLP; None where it is one matrix."""
        return self.mlp_ranks[layer] if self.mlp_ranks else (None, None)

    def with_mlp_rank(self, layer: int, which: int, rank: int | None) -> "ViTConfig":
        """The same model with another rank for one map of one MLP."""
        ranks = [list(self.mlp_rank(index)) for index in range(self.depth)]
        ranks[layer][which] = rank
        return replace(self, mlp_ranks=tuple((first, second) for first, second in ranks))

    def with_layer(self, index: int, spec: AttentionSpec) -> "ViTConfig":
        """The same model with another spec for one layer."""
        return replace(self, attention=(*self.attention[:index], spec, *self.attention[index + 1 :]))


class MLP(nn.Sequential):
    """Two linear maps with a GELU between them."""

    def __init__(self, width: int, hidden: int, ranks: tuple[int | None, int | None] = (None, None)):
        first, second = linear_of_rank(width, hidden, ranks[0]), linear_of_rank(hidden, width, ranks[1])
        super().__init__(first, nn.GELU(), second)


class Layer(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, spec: AttentionSpec, hidden: int, mlp_ranks: tuple[int | None, int | None] = (None, None)):
        super().__init__()
        self.attention_norm = nn.LayerNorm(spec.width)
        self.attention = Attention(spec)
        self.mlp_norm = nn.LayerNorm(spec.width)
        self.mlp = MLP(spec.width, hidden, mlp_ranks)

    def forward(self, tokens: Float[Tensor, "batch tokens width"]) -> Float[Tensor, "batch tokens width"]:
        """Adds attention and MLP to the residual stream."""
        tokens = tokens + self.attention(self.attention_norm(tokens))
        return tokens + self.mlp(self.mlp_norm(tokens))


class VisionTransformer(nn.Module):
    """Patches, fixed sine-cosine positions, layers, mean pooling, linear classifier. No class token, no position
    table.
    """

    positions: Tensor

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.config = config
        self.patches = nn.Conv2d(config.channels, config.width, config.patch_size, config.patch_size)
        # On the CPU even when the module is built on the meta device: positions are computed, never loaded.
        positions = sincos_positions(config.image_size // config.patch_size, config.width)
        self.register_buffer("positions", positions, persistent=False)
        self.layers = nn.ModuleList(
            Layer(spec, config.hidden, config.mlp_rank(index)) for index, spec in enumerate(config.attention)
        )
        self.tokens: nn.Module | None = None
        self.norm = nn.LayerNorm(config.width)
        self.classifier = nn.Linear(config.width, config.classes)

    def forward(self, images: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch classes"]:
        """Gives the logits."""
        size = self.config.image_size
        if images.shape[1:] != (self.config.channels, size, size):
            raise InvalidInput(
                f"images of shape {tuple(images.shape)}: this model wants [batch, {self.config.channels}, {size}, "
                f"{size}]. Load the data with image_size={size}."
            )
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        tokens = tokens + self.positions.to(tokens.dtype)
        for layer in self.layers:
            tokens = layer(tokens)
        return self.classifier(self.norm(tokens).mean(1))


def sincos_positions(side: int, width: int) -> Float[Tensor, "tokens width"]:
    """Gives fixed two-dimensional sine-cosine positions: a quarter of the width each for the sine and cosine of row
    and column.
    """
    frequencies = torch.logspace(0, -1, width // 4 + 1, base=10_000.0, device="cpu", dtype=torch.float64)[:-1]
    angles = torch.arange(side, device="cpu", dtype=torch.float64)[:, None] * frequencies
    row = angles[:, None].expand(side, side, -1)
    column = angles[None].expand(side, side, -1)
    table = torch.cat([row.sin(), row.cos(), column.sin(), column.cos()], dim=-1)
    return table.flatten(0, 1).to(torch.get_default_dtype())


def initialize_(model: VisionTransformer, seed: int, strength: float = 1.0) -> VisionTransformer:
    """Draws fresh weights: truncated normal of deviation 0.02, biases zero, every strength set to `strength`.

    A score is bounded by max|strength| / sqrt(head_dim) (Theorem 1), so a model that starts at 1 attends almost
    uniformly at first.
    """
    if not (math.isfinite(strength) and strength > 0):
        raise InvalidInput(f"strength={strength}: the initial strength must be a positive finite number.")
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("strength"):
            nn.init.constant_(parameter, strength)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif "norm" in name:
            nn.init.ones_(parameter)
        else:
            nn.init.trunc_normal_(parameter, std=0.02, generator=generator)
    return model
