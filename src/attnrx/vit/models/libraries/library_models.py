"""Creates models of a library such as timm, from a name (with or without weights) or from saved arguments."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attnrx.support.errors import AttnrxError, CheckpointError, InvalidInput, NotSupported, UnknownName
from attnrx.support.shapes import Tensor
from attnrx.vit.models.checkpoint import read_weight_file
from attnrx.vit.models.parts.vit_parts import ViTParts
from attnrx.vit.models.working.adopted import Origin


class LibraryModels(ABC):
    """The base class with a family's methods for creating models of a library such as timm.

    Raises:
        NotSupported: A method needs a library that is not installed.
    """

    name: str
    library: str
    """The name of the library's package."""
    takes_weights = False
    """Whether `load` can download weights or read them from a file."""
    size_argument = ""
    """The library's argument for the image size. Only families with `takes_weights` need it."""

    @abstractmethod
    def parts(self, source: nn.Module) -> ViTParts:
        """Returns the paths and properties of a model's parts."""

    @abstractmethod
    def num_patches(self, source: nn.Module, input_shape: tuple[int, int, int]) -> int:
        """Returns the number of patches in an image or video of this shape. Pixels at the border may be left out."""

    @abstractmethod
    def origin_inside(self, model: nn.Module) -> Origin:
        """Returns the `Origin` of a model that is part of a user's module."""

    def create(self, architecture: str, arguments: Mapping[str, Any]) -> nn.Module:
        """Creates a model of the library, without trained weights, from arguments that `origin` or `creation` returned.

        attnrx may not support the class of the created model.

        Raises:
            UnknownName: The library has no such model.
            InvalidInput: The model does not accept the arguments.
            NotSupported: The model does not come from a library.
        """
        raise NotSupported(f"{architecture} is created by the code of its user.")

    def creation(self, model: nn.Module) -> dict[str, Any] | None:
        """Returns the `architecture` and `arguments` with which `create` can create this library model again.

        Returns None if the model does not store the arguments that created it.

        Raises:
            NotSupported: The arguments cannot be saved.
        """
        return None

    def recomputed(self, module: nn.Module) -> nn.Module | None:
        """Returns a copy of a module with newly computed unsaved buffers, or None if they cannot be computed."""
        return None

    def initialized(self, name: str, *, pretrained: bool = False, **arguments: Any) -> nn.Module:
        """Creates the library's model of this name, with random weights from seed 0 (no weights on the meta device).

        If `pretrained` is true, the library downloads the weights. Only families with `takes_weights` support this.

        Raises:
            UnknownName: The library has no model of this name.
            InvalidInput: The library does not accept these arguments.
            CheckpointError: The weights or the configuration cannot be read or downloaded.
            NotSupported: The library is not installed, or the models do not come from a library.
        """
        if not self.has(name) and (names := self.names()):
            raise UnknownName(f"{self.library} model", name, names)
        with torch.random.fork_rng(devices=[]):  # because libraries draw weights from the global generator
            torch.manual_seed(0)
            try:
                return self.make(name, pretrained, arguments)
            except AttnrxError:
                raise
            except Exception as error:  # errors of several packages and types
                if pretrained:
                    raise CheckpointError(
                        f"{self.library} could not load the weights of {name} ({type(error).__name__}: {error}). Give "
                        "a file with weights=..., or pretrained=False for fresh weights."
                    ) from error
                raise InvalidInput(f"{self.library} cannot create {name} with {arguments}: {error}") from error

    def names(self) -> Sequence[str]:
        """Returns the names of the library's models, or () if the library has no list of models."""
        return ()

    def has(self, name: str) -> bool:
        """Returns whether the library lists a model with this name."""
        return name in self.names()

    def make(self, name: str, pretrained: bool, arguments: dict[str, Any]) -> nn.Module:
        """Calls the library to create a model. The caller (`initialized`) converts the library's errors.

        Raises:
            CheckpointError: The configuration cannot be read.
            NotSupported: The models do not come from a library.
        """
        raise NotSupported(f"models of the family {self.name} have no names: {name!r:.80}.")

    def instance(
        self, name: str, *, weights: Path | str | None = None, pretrained: bool | None = None, **arguments: Any
    ) -> nn.Module:
        """Returns the library's model of this name, with pretrained weights, random weights, or weights from a file.

        Args:
            name: The model's name in the library.
            weights: A weight file with the library's weight names (`read_weight_file`). The weights may be fine-tuned
                for another number of classes or another image size. By default, the library downloads pretrained
                weights.
            pretrained: If False, the model gets random weights from seed 0.
            **arguments: The library's arguments for this model, e.g. timm's `num_classes=10`.

        Raises:
            InvalidInput: You passed `weights` and `pretrained=True`, or the library does not accept the arguments.
            UnknownName: The library has no model of this name.
            CheckpointError: The weights cannot be read or downloaded, or do not fit the model.
        """
        if weights is not None and pretrained:
            raise InvalidInput(f"weights={str(weights)!r} and pretrained=True: choose one of them.")
        state = None if weights is None else read_weight_file(Path(weights))
        if state is not None:
            arguments = self._changes_in(state, name, arguments) | arguments
        model = self.initialized(name, pretrained=weights is None and pretrained is not False, **arguments)
        if state is not None:
            try:
                model.load_state_dict(self.fitted(state, model), strict=True)
            except Exception as error:  # the conversions of libraries and torch raise errors of many types
                raise CheckpointError(f"the weights in {weights} do not fit {self.name}:{name} ({error}).") from error
        return model

    def _changes_in(self, state: Mapping[str, Tensor], name: str, arguments: Mapping[str, Any]) -> dict[str, int]:
        """Returns, as the library's arguments, the number of classes and the image size of fine-tuned weights.

        An argument is returned only if its value differs from the value in the library's own model of this name.

        Raises:
            CheckpointError: The number of position embeddings does not fit a square grid of patches.
        """
        with torch.device("meta"):
            model = self.initialized(name, **arguments)
        published, changes = model.state_dict(), dict[str, int]()
        both = [(path, published[path].shape, tensor.shape) for path, tensor in state.items() if path in published]
        # Classifiers are the linear maps with another number of rows, but the same columns. Distilled models have two.
        rows = {own[0] for _, other, own in both if len(own) == 2 and own[0] != other[0] and own[1:] == other[1:]}
        # If no such map exists, the classifier is a map that the published model lacks.
        rows = rows or {len(own) for path, own in state.items() if path not in published and own.ndim == 2}
        if len(rows) == 1:
            changes["num_classes"] = rows.pop()
        # Position embeddings are the tables [1, tokens, width] with another number of tokens.
        tables = [
            (path, other[1], own[1])
            for path, other, own in both
            if len(own) == len(other) == 3 and own[0] == other[0] == 1 and own[1] != other[1] and own[2] == other[2]
        ]
        if tables and self.size_argument:
            path, tokens, own = tables[0]
            patches: Any = model.get_submodule(self.parts(model).patches)
            # If the tokens before the patches have positions, they are subtracted.
            count = own - (tokens - self.num_patches(model, self.origin_inside(model).input_shape))
            side = math.isqrt(max(count, 0))
            if not count or side * side != count:
                raise CheckpointError(
                    f"{path} of the weights has {own} tokens, of which no square grid is left: create the model of "
                    f"{self.library} for the size of its images, load the weights into it, and then attnrx.load it."
                )
            changes[self.size_argument] = side * patches.stride[0]
        return changes

    def fitted(self, state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
        """Converts the tensors of a weight file to this model's names and shapes, as the library's loader does."""
        return state

    def input_format(self, name: str) -> dict[str, Any]:
        """Returns the input format of downloaded weights as arguments of `adopt`, or {} if the model stores it."""
        return {}
