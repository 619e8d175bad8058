"""The base classes of attnrx models: configuration, layers, weight initialization."""

import math
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch
from torch import nn

from attnrx.attention import Attention
from attnrx.errors import InvalidInput
from attnrx.models.low_rank_linear import linear_of_rank
from attnrx.shapes import Float, Tensor
from attnrx.spec import AttentionSpec

Model = TypeVar("Model", bound=nn.Module)
Config = TypeVar("Config", bound="TransformerConfig")

MOST_PATCHES = 65_536  # 4,096 x 4,096 pixels in patches of 16


@dataclass(frozen=True)
class TransformerConfig:
    """The shape of the model and its input format.

    `attention` holds one spec per layer, so that a compressed model is described completely. `mlp_ranks` holds the
    ranks of the two maps of every MLP (None: one matrix), or is empty. `mean` and `std` are the image normalization
    that the model was trained with.
    """

    attention: tuple[AttentionSpec, ...]
    image_size: int
    patch_size: int
    channels: int
    classes: int
    mlp_ratio: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    mlp_ranks: tuple[tuple[int | None, int | None], ...]

    def __post_init__(self):
        if not self.attention:
            raise InvalidInput("a transformer needs at least one layer; give one AttentionSpec per layer.")
        self._require_ranges()
        if self.image_size % self.patch_size:
            raise InvalidInput(f"patch_size {self.patch_size} does not divide image_size {self.image_size}.")
        if self.mlp_ranks and len(self.mlp_ranks) != self.depth:
            raise InvalidInput(f"{len(self.mlp_ranks)} pairs of MLP ranks for {self.depth} layers: give one each.")
        if len(self.mean) != self.channels or len(self.std) != self.channels:
            raise InvalidInput(
                f"{len(self.mean)} means and {len(self.std)} stds for {self.channels} channels: give one each."
            )

    def _require_ranges(self) -> None:
        for name in ("image_size", "patch_size", "channels", "classes"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name} is {getattr(self, name)}; it must be 1 or more.")
        if not 0 < self.mlp_ratio < math.inf or not all(0 < value < math.inf for value in self.std):
            raise InvalidInput(f"mlp_ratio {self.mlp_ratio} and std {self.std} must be positive and finite.")
        if self.patches > MOST_PATCHES:
            raise InvalidInput(
                f"image_size {self.image_size} with patch_size {self.patch_size} gives {self.patches:,} patches; at "
                f"most {MOST_PATCHES:,} are supported."
            )

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
    def patches(self) -> int:
        """Patches of an image."""
        return (self.image_size // self.patch_size) ** 2

    def mlp_rank(self, layer: int) -> tuple[int | None, int | None]:
        """Returns the ranks of the two maps of one layer's MLP; None where the map is one matrix."""
        return self.mlp_ranks[layer] if self.mlp_ranks else (None, None)

    def with_mlp_rank(self: Config, layer: int, which: int, rank: int | None) -> Config:
        """Returns the configuration with another rank for one map of one MLP."""
        ranks = [list(self.mlp_rank(index)) for index in range(self.depth)]
        ranks[layer][which] = rank
        return replace(self, mlp_ranks=tuple((first, second) for first, second in ranks))

    def with_layer(self: Config, index: int, spec: AttentionSpec) -> Config:
        """Returns the configuration with another spec for one layer."""
        return replace(self, attention=(*self.attention[:index], spec, *self.attention[index + 1 :]))

    def with_attention(self: Config, attention: tuple[AttentionSpec, ...] | None) -> Config:
        """Returns the configuration with other specs in all layers; None changes nothing."""
        if attention is None:
            return self
        if len(attention) != self.depth:
            raise InvalidInput(f"{len(attention)} attention specs for {self.depth} layers: give one for each layer.")
        return replace(self, attention=attention)


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


class Transformer(nn.Module, Generic[Config]):
    """The base of attnrx models: layers, a final norm, and the configuration that describes them."""

    layers: nn.ModuleList
    norm: nn.LayerNorm

    def __init__(self, config: Config):
        super().__init__()
        self.config: Config = config
        self.tokens: nn.Module | None = None

    def require_images(self, images: Float[Tensor, "batch channels height width"]) -> None:
        """Raises InvalidInput for images of another shape."""
        size = self.config.image_size
        if images.shape[1:] != (self.config.channels, size, size):
            raise InvalidInput(
                f"images of shape {tuple(images.shape)}: this model takes [batch, {self.config.channels}, {size}, "
                f"{size}]. Load the data with image_size={size}."
            )


def initialize_(model: Model, seed: int, strength: float = 1.0) -> Model:
    """Initializes the weights: truncated normal of standard deviation 0.02, biases zero, every strength `strength`.

    A score is bounded by max|strength| / sqrt(head_dim) (Theorem 1), so at strength 1 attention is almost uniform at
    first.
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
