"""The family of our own Vision Transformers, SVDA or dense, with the paper's named configurations."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from attnrx.attention import Attention
from attnrx.config import from_dict, to_dict
from attnrx.costs import ModelCosts, PartCosts, TokenCosts, layer_costs, linear_costs, norm_costs
from attnrx.errors import InvalidInput, UnknownName
from attnrx.models.family import Family
from attnrx.models.low_rank_linear import rank_of
from attnrx.models.token_prices import priced_tokens
from attnrx.models.vit import VisionTransformer, ViTConfig
from attnrx.spec import AttentionSpec
from attnrx.tokens import TokenLayout, TokenPolicy

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


class ViTFamily(Family):
    """`svda:NAME` and `dense:NAME`, e.g. `svda:cifar10`."""

    name = "vit"

    def matches(self, model: nn.Module) -> bool:
        """Whether the model is a VisionTransformer of ours."""
        return isinstance(model, VisionTransformer)

    def attention(self, model: nn.Module) -> tuple[Attention, ...]:
        """The attention of every layer."""
        return tuple(layer.attention for layer in _own(model).layers)  # type: ignore[union-attr]

    def set_attention_(self, model: nn.Module, layer: int, attention: Attention) -> None:
        """Replaces one layer's attention and its spec in the configuration."""
        vit = _own(model)
        vit.layers[layer].attention = attention
        vit.config = vit.config.with_layer(layer, attention.spec)

    def mlp(self, model: nn.Module) -> tuple[tuple[nn.Module, nn.Module], ...]:
        """The two linear maps of every MLP."""
        return tuple((layer.mlp[0], layer.mlp[2]) for layer in _own(model).layers)  # type: ignore[union-attr]

    def set_mlp_(self, model: nn.Module, layer: int, which: int, linear: nn.Module) -> None:
        """Replaces one map of one MLP and its rank in the configuration."""
        vit = _own(model)
        vit.set_submodule(f"layers.{layer}.mlp.{2 * which}", linear)
        vit.config = vit.config.with_mlp_rank(layer, which, rank_of(linear))

    def describe(self, model: nn.Module) -> dict[str, Any]:
        """The configuration as a dictionary."""
        return to_dict(_own(model).config)

    def build(self, description: Mapping[str, Any]) -> nn.Module:
        """Builds the model from its configuration."""
        return VisionTransformer(from_dict(description, (ViTConfig, AttentionSpec)))

    def input_shape(self, model: nn.Module) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        config = _own(model).config
        return config.channels, config.image_size, config.image_size

    def normalization(self, model: nn.Module) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of the training data."""
        config = _own(model).config
        return config.mean, config.std

    def token_layout(self, model: nn.Module) -> TokenLayout:
        """Patches alone, whose mean is classified."""
        return TokenLayout(0, _own(model).config.tokens, class_token=False, pooled="mean")

    def pooled_norm(self, model: nn.Module) -> nn.Module:
        """The norm before the mean."""
        return _own(model).norm

    def costs(
        self,
        model: nn.Module,
        attention: tuple[AttentionSpec, ...] | None = None,
        mlp_ranks: tuple[tuple[int | None, int | None], ...] | None = None,
        tokens: TokenPolicy | None = None,
    ) -> ModelCosts:
        """Prices the configuration, with other specs, ranks and tokens in its layers on request."""
        config = _own(model).config
        priced = priced_tokens(model, self, tokens, attention or config.attention, config.tokens)
        return config_costs(config if mlp_ranks is None else replace(config, mlp_ranks=mlp_ranks), attention, priced)


def named_config(form: str, scenario: str, **changes: Any) -> ViTConfig:
    """The configuration `form:scenario`, with any field of ViTConfig, width, depth or heads changed on request."""
    if scenario not in SCENARIOS:
        raise UnknownName("configuration", scenario, SCENARIOS)
    return ViTConfig.uniform(form, **{**SCENARIOS[scenario], **changes})


def config_costs(
    config: ViTConfig, attention: tuple[AttentionSpec, ...] | None = None, tokens: TokenCosts | None = None
) -> ModelCosts:
    """Prices a configuration without building it, with other specs and tokens in its layers on request.

    That prices a prescription before it is realized.
    """
    priced = tokens or TokenCosts((config.tokens,) * config.depth)
    if attention is not None:
        if len(attention) != config.depth:
            raise InvalidInput(f"{len(attention)} attention specs for {config.depth} layers: give one for each layer.")
        config = replace(config, attention=attention)
    return ModelCosts(
        patches=linear_costs(config.channels * config.patch_size**2, config.width, config.tokens),
        layers=tuple(
            layer_costs(spec, own, config.hidden, config.mlp_rank(index))
            for index, (spec, own) in enumerate(zip(config.attention, priced.tokens, strict=True))
        ),
        classifier=norm_costs(config.width) + PartCosts((config.width + 1) * config.classes),
        classifier_macs=config.width * config.classes,
        predictors=priced.predictors,
        predictor_norm_features=priced.norm_features,
    )


def _own(model: nn.Module) -> VisionTransformer:
    if not isinstance(model, VisionTransformer):
        raise InvalidInput(f"{type(model).__name__} is not an attnrx VisionTransformer.")
    return model
