"""Locates the modules of a model of another library: layers, attention, MLP, norms, patches and heads."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from attnrx.attention import Attention
from attnrx.models.adopted import Adapter, Adopted, Origin
from attnrx.models.unsupported_features import Refusal


class LibraryReader(ABC):
    """The locations of the parts of a library's models. A subclass states them and lists unsupported features."""

    model_type: type[Adopted]
    adapter_type: type[Adapter]
    attention_name: str
    mlp_types: tuple[str, ...]
    """Classes of MLPs with two linear maps, fc1 and fc2, and an activation between them; others are not compressed."""
    head_names: tuple[str, ...]
    """Paths, in the source, of the classifier and the norm before it; paths that a model lacks are skipped."""
    classifier_names: tuple[str, ...]
    """The entries of `head_names` that are classifiers; two for models with a distillation token."""
    pooled_names: tuple[str, ...] = ()
    """Those of `head_names` that run on one pooled token instead of all tokens."""

    @abstractmethod
    def adopts(self, model: nn.Module) -> bool:
        """Returns whether the model comes from this library, so that `adopt` accepts or refuses it; imports nothing."""

    @abstractmethod
    def refusals(self, model: nn.Module) -> Iterator[Refusal]:
        """Yields every reason why the model cannot be adopted, without reading its weights."""

    @abstractmethod
    def origin(self, model: nn.Module, stated: Mapping[str, Any]) -> Origin:
        """Returns how the model was created and its input format; values in `stated` have precedence."""

    @abstractmethod
    def create(self, origin: Origin) -> nn.Module:
        """Creates the model with its own library, without pretrained weights."""

    @abstractmethod
    def layers(self, source: nn.Module) -> tuple[nn.Module, ...]:
        """Returns the transformer blocks."""

    @abstractmethod
    def own(self, attention: nn.Module) -> Attention:
        """Returns attnrx attention with the weights of a library's attention module."""

    @abstractmethod
    def norm_before(self, layer: nn.Module) -> str | None:
        """Returns the path, inside a block, of the norm before its attention; used by the last-layer class-token
        shortcut.
        """

    @abstractmethod
    def patches(self, source: nn.Module) -> nn.Conv2d:
        """Returns the convolution of the patch embedding."""

    @abstractmethod
    def prefix_tokens(self, source: nn.Module) -> int:
        """Returns the number of tokens before the patches: class, distillation and register tokens."""

    @abstractmethod
    def has_class_token(self, source: nn.Module) -> bool:
        """Returns whether the first token is a class token."""

    @abstractmethod
    def pooling(self, source: nn.Module) -> str:
        """Returns how the tokens are pooled: "class", "mean", or another name for an unsupported kind of pooling."""

    @abstractmethod
    def last_norm(self, source: nn.Module) -> nn.Module:
        """Returns the norm after the last layer, or the module in its place."""
