"""The family of the Vision Transformers of attnrx, SVDA or dense, with the paper's named configurations."""

from typing import Any

from torch import nn

from attnrx.costs import ModelCosts, PartCosts, TokenCosts, layer_costs, linear_costs, norm_costs
from attnrx.errors import UnknownName
from attnrx.models.own_family import OwnFamily
from attnrx.models.vit import VisionTransformer, ViTConfig
from attnrx.spec import AttentionSpec
from attnrx.tokens import TokenLayout

# The input scenarios of the paper (Tables 3 and 4), and small ones for demonstrations and tests.
SCENARIOS: dict[str, dict[str, Any]] = {
    "fashion_mnist": {"channels": 1, "classes": 10},
    "cifar10": {"classes": 10},
    "cifar100": {"classes": 100},
    "food101": {"classes": 101, "image_size": 224, "patch_size": 16},
    "tiny_imagenet": {"classes": 200, "image_size": 64, "patch_size": 8},
    "imagenette": {"classes": 10, "image_size": 224, "patch_size": 16},
    "imagenet-1k": {"classes": 1000, "image_size": 224, "patch_size": 16},
    "digits": {
        "channels": 1,
        "classes": 10,
        "image_size": 16,
        "patch_size": 2,
        "width": 64,
        "depth": 3,
        "heads": 4,
    },
}


class ViTFamily(OwnFamily[ViTConfig]):
    """`svda:NAME` and `dense:NAME`, e.g. `svda:cifar10`."""

    name = "vit"
    model_type = VisionTransformer
    config_type = ViTConfig

    def patch_embedding(self, model: nn.Module) -> nn.Module:
        """Returns the convolution of the patch embedding."""
        return self._own(model).get_submodule("patches")

    def token_layout(self, model: nn.Module) -> TokenLayout:
        """Returns the layout: patches only, mean pooling."""
        return TokenLayout(0, self._own(model).config.patches, class_token=False, pooled="mean")

    def price(
        self, config: ViTConfig, attention: tuple[AttentionSpec, ...] | None, tokens: TokenCosts | None
    ) -> ModelCosts:
        return config_costs(config, attention, tokens)


def named_config(form: str, scenario: str, **changes: Any) -> ViTConfig:
    """Returns the configuration `form:scenario`; `changes` override fields of ViTConfig, width, depth or heads."""
    if scenario not in SCENARIOS:
        raise UnknownName("configuration", scenario, SCENARIOS)
    return ViTConfig.uniform(form, **{**SCENARIOS[scenario], **changes})


def config_costs(
    config: ViTConfig, attention: tuple[AttentionSpec, ...] | None = None, tokens: TokenCosts | None = None
) -> ModelCosts:
    """Returns the costs of a configuration without building it, optionally with other specs and tokens in its layers.

    This gives the costs of a prescription before it is realized.
    """
    token_costs = tokens or TokenCosts((config.tokens,) * config.depth)
    config = config.with_attention(attention)
    return ModelCosts(
        patches=linear_costs(config.channels * config.patch_size**2, config.width, config.tokens),
        layers=tuple(
            layer_costs(spec, own, config.hidden, config.mlp_rank(index))
            for index, (spec, own) in enumerate(zip(config.attention, token_costs.tokens, strict=True))
        ),
        classifier=norm_costs(config.width) + PartCosts((config.width + 1) * config.classes),
        classifier_macs=config.width * config.classes,
        predictors=token_costs.predictors,
        predictor_norm_features=token_costs.norm_features,
    )
