"""The family of LV-ViT, with the published sizes and weights."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from attnrx.costs import ModelCosts, PartCosts, TokenCosts, layer_costs, linear_costs, norm_costs
from attnrx.errors import UnknownName
from attnrx.models.lvvit import LVViT, LVViTConfig
from attnrx.models.lvvit_weights import read_published
from attnrx.models.own_family import OwnFamily
from attnrx.spec import AttentionSpec
from attnrx.tokens import TokenLayout

# The sizes that the authors' code names lvvit_t, lvvit_s and lvvit_m.
SIZES: dict[str, dict[str, Any]] = {
    "t": {"width": 240, "depth": 12, "heads": 4},
    "s": {"width": 384, "depth": 16, "heads": 6, "divisor": 2.0},
    "m": {"width": 512, "depth": 20, "heads": 8, "divisor": 2.0},
}


class LVViTFamily(OwnFamily[LVViTConfig]):
    """`lvvit:t`, `lvvit:s` and `lvvit:m`."""

    name = "lvvit"
    model_type = LVViT
    config_type = LVViTConfig

    def load(self, size: str, weights: Path | str, **changes: Any) -> LVViT:
        """Creates a model with the weights of a published file (safetensors, or a torch checkpoint), in evaluation
        mode.

        `changes` override fields of its configuration, e.g. `image_size=384` for weights trained at that size.

        Raises:
            CheckpointError: The file is not a weight file, or a tensor in it or in the model has no counterpart; it is
                named.
        """
        config = lvvit_config(size, **changes)
        with torch.device("meta"):
            model = LVViT(config)
        model.load_state_dict(read_published(Path(weights), model, f"lvvit:{size}"), strict=True, assign=True)
        return model.requires_grad_(True).eval()

    def patch_embedding(self, model: nn.Module) -> nn.Module:
        """Returns the stem."""
        return self._own(model).get_submodule("stem")

    def token_layout(self, model: nn.Module) -> TokenLayout:
        """Returns the layout: a class token before the patches; max pooling where the patches are classified too."""
        config = self._own(model).config
        pooled = "max" if config.classifies_patches else "class"
        return TokenLayout(1, config.patches, class_token=True, pooled=pooled)

    def price(
        self, config: LVViTConfig, attention: tuple[AttentionSpec, ...] | None, tokens: TokenCosts | None
    ) -> ModelCosts:
        return lvvit_costs(config, attention, tokens)


def lvvit_config(size: str, **changes: Any) -> LVViTConfig:
    """Returns the configuration `lvvit:SIZE`; `changes` override fields of LVViTConfig, form, width, depth or heads."""
    if size not in SIZES:
        raise UnknownName("size of LV-ViT", size, SIZES)
    return LVViTConfig.uniform(**{**SIZES[size], **changes})


def lvvit_costs(
    config: LVViTConfig, attention: tuple[AttentionSpec, ...] | None = None, tokens: TokenCosts | None = None
) -> ModelCosts:
    """Returns the costs of a configuration without building it, optionally with other specs and tokens in its layers.

    Patches are classified after the last layer, so pruned tokens reduce the MACs of the classifier too.
    """
    config = config.with_attention(attention)
    token_costs = tokens or TokenCosts((config.tokens,) * config.depth)
    classified = token_costs.tokens[-1] if config.classifies_patches else 1
    classifiers = 2 if config.classifies_patches else 1
    return ModelCosts(
        patches=stem_costs(config),
        embeddings=PartCosts((1 + config.tokens) * config.width),
        layers=tuple(
            layer_costs(spec, own, config.hidden, config.mlp_rank(index))
            for index, (spec, own) in enumerate(zip(config.attention, token_costs.tokens, strict=True))
        ),
        classifier=norm_costs(config.width) + PartCosts(classifiers * (config.width + 1) * config.classes),
        classifier_macs=classified * config.width * config.classes,
        predictors=token_costs.predictors,
        predictor_norm_features=token_costs.norm_features,
    )


def stem_costs(config: LVViTConfig) -> PartCosts:
    """Returns the costs of the stem: three convolutions at half the image size with their BatchNorms, and the
    projection.
    """
    own, pixels = config.stem_channels, (config.image_size // 2) ** 2
    kernels = (config.channels * 7**2, own * 3**2, own * 3**2)
    convolutions = (linear_costs(inputs, own, pixels, bias=False) + norm_costs(own) for inputs in kernels)
    projection = linear_costs(own * (config.patch_size // 2) ** 2, config.width, config.patches)
    return sum(convolutions, start=projection)
