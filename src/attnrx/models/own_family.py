"""The base class of the families of attnrx models, which are described by their configuration."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Generic

from torch import nn

from attnrx.attention import Attention
from attnrx.costs import ModelCosts, TokenCosts
from attnrx.errors import InvalidInput
from attnrx.models.family import Family
from attnrx.models.low_rank_linear import rank_of
from attnrx.models.token_costs import costs_of_tokens
from attnrx.models.transformer import Config, Transformer
from attnrx.serialization.config import from_dict, to_dict
from attnrx.spec import AttentionSpec
from attnrx.tokens import TokenPolicy


class OwnFamily(Family, Generic[Config]):
    """A family of attnrx models. A subclass defines the model class, its tokens and its costs."""

    model_type: type[Transformer[Config]]
    config_type: type[Config]

    def matches(self, model: nn.Module) -> bool:
        """Returns whether the model is of this family."""
        return isinstance(model, self.model_type)

    def attention(self, model: nn.Module) -> tuple[Attention, ...]:
        """Returns the attention of every layer."""
        return tuple(layer.attention for layer in self._own(model).layers)  # type: ignore[misc]

    def set_attention_(self, model: nn.Module, layer: int, attention: Attention) -> None:
        """Replaces one layer's attention and its spec in the configuration."""
        own = self._own(model)
        own.layers[layer].attention = attention
        own.config = own.config.with_layer(layer, attention.spec)

    def mlp(self, model: nn.Module) -> tuple[tuple[nn.Module, nn.Module], ...]:
        """Returns the two linear maps of every MLP."""
        return tuple((layer.mlp[0], layer.mlp[2]) for layer in self._own(model).layers)  # type: ignore[union-attr]

    def set_mlp_(self, model: nn.Module, layer: int, which: int, linear: nn.Module) -> None:
        """Replaces one map of one MLP and its rank in the configuration."""
        own = self._own(model)
        own.set_submodule(f"layers.{layer}.mlp.{2 * which}", linear)
        own.config = own.config.with_mlp_rank(layer, which, rank_of(linear))

    def describe(self, model: nn.Module) -> dict[str, Any]:
        """Returns the configuration as a dictionary."""
        return to_dict(self._own(model).config)

    def build(self, description: Mapping[str, Any]) -> nn.Module:
        """Builds the model from its configuration."""
        return self.model_type(from_dict(description, (self.config_type, AttentionSpec)))

    def input_shape(self, model: nn.Module) -> tuple[int, int, int]:
        """Returns channels, height and width of an image."""
        config = self._own(model).config
        return config.channels, config.image_size, config.image_size

    def normalization(self, model: nn.Module) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Returns the mean and standard deviation of the image normalization."""
        config = self._own(model).config
        return config.mean, config.std

    def costs(
        self,
        model: nn.Module,
        attention: tuple[AttentionSpec, ...] | None = None,
        mlp_ranks: tuple[tuple[int | None, int | None], ...] | None = None,
        tokens: TokenPolicy | None = None,
    ) -> ModelCosts:
        """Returns the costs of the configuration, optionally with other specs, ranks and tokens in its layers."""
        config = self._own(model).config
        num_tokens = self.token_layout(model).tokens
        token_costs = costs_of_tokens(model, self, tokens, attention or config.attention, num_tokens)
        return self.price(config if mlp_ranks is None else replace(config, mlp_ranks=mlp_ranks), attention, token_costs)

    @abstractmethod
    def price(
        self, config: Config, attention: tuple[AttentionSpec, ...] | None, tokens: TokenCosts | None
    ) -> ModelCosts:
        """Returns the costs of a configuration, optionally with other specs and tokens in its layers."""

    def pooled_norm(self, model: nn.Module) -> nn.Module:
        """Returns the norm after the last layer."""
        return self._own(model).norm

    def heads(self, model: nn.Module) -> tuple[nn.Linear, ...]:
        """Returns the classifier of the class token, or of the mean."""
        return (self._own(model).classifier,)  # type: ignore[return-value]

    def _own(self, model: nn.Module) -> Transformer[Config]:
        if not isinstance(model, self.model_type):
            raise InvalidInput(f"{type(model).__name__} is not an attnrx {self.model_type.__name__}.")
        return model
