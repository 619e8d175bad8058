"""What attnrx must know about a model: where its attention layers are and how it is described and rebuilt."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from attnrx.attention import Attention
from attnrx.costs import ModelCosts
from attnrx.errors import InvalidInput, NotSupported
from attnrx.shapes import Tensor
from attnrx.spec import AttentionSpec
from attnrx.storage import fingerprint
from attnrx.tokens import TokenLayout, TokenPolicy


class Family(ABC):
    """One kind of model. A family maps names; it never changes a model except through `set_attention_`."""

    name: str

    @abstractmethod
    def matches(self, model: nn.Module) -> bool:
        """Whether the model is of this family."""

    @abstractmethod
    def attention(self, model: nn.Module) -> tuple[Attention, ...]:
        """The attention of every layer, in order."""

    @abstractmethod
    def set_attention_(self, model: nn.Module, layer: int, attention: Attention) -> None:
        """Puts another attention into one layer, in place, and updates the model's own description."""

    @abstractmethod
    def mlp(self, model: nn.Module) -> tuple[tuple[nn.Module, nn.Module], ...]:
        """The two linear maps (or their low-rank forms) of every layer's MLP; () where the model has another kind."""

    @abstractmethod
    def set_mlp_(self, model: nn.Module, layer: int, which: int, linear: nn.Module) -> None:
        """Puts another map into one layer's MLP, the first (0) or the second (1), and updates the description."""

    @abstractmethod
    def describe(self, model: nn.Module) -> dict[str, Any]:
        """A JSON-ready description from which `build` makes the same model, without its weights."""

    @abstractmethod
    def build(self, description: Mapping[str, Any]) -> nn.Module:
        """Builds the described model; called on the meta device when loading."""

    def library_model(self, model: nn.Module) -> nn.Module:
        """The model as its own library makes and runs it, with fresh weights: what a speed is compared with."""
        return self.build(self.describe(model))

    @abstractmethod
    def input_shape(self, model: nn.Module) -> tuple[int, int, int]:
        """Channels, height and width of an image."""

    @abstractmethod
    def normalization(self, model: nn.Module) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation that the model's images are normalized with, one per channel."""

    def preprocessing(self, model: nn.Module) -> Callable[[Any], Tensor] | None:
        """The transform of the model's library from a PIL picture to a float tensor; None where it has none."""
        return None

    def class_names(self, model: nn.Module) -> tuple[str, ...]:
        """What its classes are called, in the order of its logits; () where the model does not say."""
        return ()

    @abstractmethod
    def patch_embedding(self, model: nn.Module) -> nn.Module:
        """The module whose first argument is the images."""

    @abstractmethod
    def token_layout(self, model: nn.Module) -> TokenLayout:
        """The tokens before the first layer, and how the answer is read off those after the last."""

    @abstractmethod
    def pooled_norm(self, model: nn.Module) -> nn.Module:
        """What gives the tokens that the answer is read off."""

    @abstractmethod
    def heads(self, model: nn.Module) -> tuple[nn.Linear, ...]:
        """The linear maps that answer for the whole image, from one token or a mean; () where the model has none."""

    @abstractmethod
    def costs(
        self,
        model: nn.Module,
        attention: tuple[AttentionSpec, ...] | None = None,
        mlp_ranks: tuple[tuple[int | None, int | None], ...] | None = None,
        tokens: TokenPolicy | None = None,
    ) -> ModelCosts:
        """Parameters and MACs in closed form: of the model as it is, or with these specs and ranks in its layers.

        Every layer is priced at its own number of tokens: those that the policy leaves, the given one or else the one
        that the model carries.
        """


def model_fingerprint(model: nn.Module) -> str:
    """Identifies a model by its weights."""
    require_ordinary_weights(model)
    return fingerprint(model.state_dict())


def require_ordinary_weights(model: nn.Module) -> None:
    """Refuses models whose weights cannot be read, compared and stored one by one.

    Raises:
        NotSupported: Quantized modules, whose weights are packed, or two names that share one tensor.
        InvalidInput: Weights on the meta device, or of several floating-point types.
    """
    name, first = type(model).__name__, {}
    for key, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise NotSupported(
                f"{name} holds {key}, which is no tensor but {type(value).__name__}: it was quantized by torch. Take "
                "the model before that; `attnrx export --to int8` quantizes a model for ONNX Runtime."
            )
        if value.is_meta:
            raise InvalidInput(f"{name} has no weights: {key} is on the meta device. Build or load it with weights.")
        if value.is_floating_point():
            first.setdefault(value.dtype, key)
        shared = first.setdefault(id(value), key)
        if shared != key:
            raise NotSupported(
                f"{name} shares one tensor between {shared} and {key}, so one cannot be changed without the other. "
                f"Give each its own: model.get_parameter({key!r}) must be a copy."
            )
    dtypes = {kind: key for kind, key in first.items() if isinstance(kind, torch.dtype)}
    if len(dtypes) > 1:
        found = " and ".join(f"{kind} ({key})" for kind, key in dtypes.items())
        raise InvalidInput(f"{name} mixes floating-point types: {found}. Convert it, e.g. model.float().")
