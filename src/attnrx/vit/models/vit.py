"""The Vision Transformer of attnrx: the compact SVDA-ViT of the paper, and the same model with dense attention."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from attnrx.support.display import Displayed
from attnrx.support.errors import InvalidInput, UnknownName
from attnrx.support.shapes import Float, ImageBatch, Logits, Tensor
from attnrx.vit.costs import PartCosts, linear_costs
from attnrx.vit.models.transformer import AttnrxFamily, Layer, Transformer, TransformerConfig
from attnrx.vit.spec import AttentionSpec
from attnrx.vit.tokens import TokenLayout

# The input scenarios of SVDA (Tables 3 and 4), and small ones for demonstrations and tests.
SCENARIOS: dict[str, dict[str, Any]] = {
    "fashion_mnist": {"channels": 1, "classes": 10},
    "cifar10": {"classes": 10},
    "cifar100": {"classes": 100},
    "food101": {"classes": 101, "image_size": 224, "patch_size": 16},
    "tiny_imagenet": {"classes": 200, "image_size": 64, "patch_size": 8},
    "imagenette": {"classes": 10, "image_size": 224, "patch_size": 16},
    "imagenet-1k": {"classes": 1000, "image_size": 224, "patch_size": 16},
    "digits": {"channels": 1, "classes": 10, "image_size": 16, "patch_size": 2, "width": 64, "depth": 3, "heads": 4},
    "cluttered-digits": {
        "channels": 1,
        "classes": 10,
        "image_size": 40,
        "patch_size": 4,
        "width": 64,
        "depth": 6,
        "heads": 4,
        "mlp_ratio": 2.0,
    },
}


@dataclass(frozen=True, repr=False)
class ViTConfig(Displayed, TransformerConfig):
    """The shape of a Vision Transformer without class token, and its input format."""

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
        half = (0.5,) * facts.get("channels", 3)
        return cls(attention=(AttentionSpec.full(form, width, heads),) * depth, **{"mean": half, "std": half, **facts})

    def patch_costs(self) -> PartCosts:
        return linear_costs(self.channels * self.patch_size**2, self.width, self.patches)


class VisionTransformer(Transformer[ViTConfig]):
    """Patches, fixed sine-cosine position embeddings, layers, mean pooling, linear classifier; no class token."""

    positions: Tensor

    def __init__(self, config: ViTConfig):
        super().__init__(config)
        self.patches = nn.Conv2d(config.channels, config.width, config.patch_size, config.patch_size)
        # On the CPU even when the module is built on the meta device: positions are computed, not loaded.
        positions = sincos_positions(config.image_size // config.patch_size, config.width)
        # A buffer follows the model's device; it is not saved, because the configuration determines it.
        self.register_buffer("positions", positions, persistent=False)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.depth))
        self.norm = nn.LayerNorm(config.width)
        self.classifier = nn.Linear(config.width, config.classes)

    def logits(self, images: ImageBatch) -> Logits:
        tokens = self.patches(images).flatten(2).transpose(1, 2)  # batch, patches, width
        tokens = tokens + self.positions.to(tokens.dtype)
        for layer in self.layers:
            tokens = layer(tokens)
        return self.classifier(self.norm(tokens).mean(1))


def sincos_positions(side: int, width: int) -> Float[Tensor, "tokens width"]:
    """Returns fixed two-dimensional sine-cosine position embeddings.

    A quarter of the width each holds the sine and the cosine of row and column.
    """
    # In float64, rounded once at the end. The frequencies fall from 1 to 1/10,000, which is excluded.
    frequencies = torch.logspace(0, -1, width // 4 + 1, base=10_000.0, device="cpu", dtype=torch.float64)[:-1]
    angles = torch.arange(side, device="cpu", dtype=torch.float64)[:, None] * frequencies
    row = angles[:, None].expand(side, side, -1)
    column = angles[None].expand(side, side, -1)
    table = torch.cat([row.sin(), row.cos(), column.sin(), column.cos()], dim=-1)
    return table.flatten(0, 1).to(torch.get_default_dtype())


class ViTFamily(AttnrxFamily[ViTConfig]):
    """`svda:NAME` and `dense:NAME`, e.g. `svda:cifar10`."""

    name = "vit"
    model_type = VisionTransformer
    config_type = ViTConfig

    def names(self) -> tuple[str, ...]:
        return tuple(f"{form}:{scenario}" for form in ("svda", "dense") for scenario in SCENARIOS)

    def config(self, name: str, **changes: Any) -> ViTConfig:
        return named_config(*name.split(":"), **changes)

    def patch_embedding(self, model: nn.Module) -> nn.Module:
        return self._transformer(model).get_submodule("patches")

    def token_layout(self, model: nn.Module) -> TokenLayout:
        return TokenLayout(0, self._transformer(model).config.patches, class_token=False, pooled="mean")


def named_config(form: str, scenario: str, **changes: Any) -> ViTConfig:
    """Returns the configuration `form:scenario`; `changes` override fields of ViTConfig, width, depth or heads.

    Raises:
        UnknownName: There is no such scenario.
    """
    if scenario not in SCENARIOS:
        raise UnknownName("configuration", scenario, SCENARIOS)
    return ViTConfig.uniform(form, **{**SCENARIOS[scenario], **changes})
