"""The family of users' own modules, which a reader describes and a factory creates."""

import copy
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from attnrx.support.arguments import described, described_error
from attnrx.support.dataclass_records import from_dict, to_dict
from attnrx.support.errors import AttnrxError, InvalidInput, NotSupported, UserCodeError
from attnrx.vit.models.adopted import Adopted, Origin, image_shape
from attnrx.vit.models.adopted_family import unsaved_buffers
from attnrx.vit.models.reader import Reader, ReaderFamily

Factory = Callable[..., nn.Module]


@dataclass(frozen=True)
class Blueprint:
    """How a module is read and created anew: `factory(**reader.arguments)` returns it with any weights.

    `name` is "module:class" of its class, by which a saved model finds it again.
    """

    reader: Reader
    factory: Factory
    name: str


class ModuleModel(Adopted):
    """A user's own Vision Transformer with attnrx attention."""


class ModuleFamily(ReaderFamily):
    """Any Vision Transformer with a `Reader`; its class is created again when a model is loaded.

    A saved model holds the name of the class and never code. The class must have been imported when such a model is
    loaded; otherwise the `factory` is used. Nothing is imported or called by a name in a file.
    """

    shapes_are_stated = True

    name = library = "module"
    model_type = ModuleModel

    def __init__(self, factory: Factory | None = None):
        self.factory = factory

    def read(self, model: nn.Module, reader: Reader) -> Adopted:
        """Adopts a model whose parts the reader names.

        Raises:
            InvalidInput: The reader is no `Reader`.
            NotSupported: The model lacks a part that the reader names, or differs from what it states.
        """
        if not isinstance(reader, Reader):
            raise InvalidInput(f"reader={reader!r:.80}: give an attnrx.Reader with the paths of the model's parts.")
        kind = type(model)
        blueprint = Blueprint(reader, self.factory or kind, f"{kind.__module__}:{kind.__qualname__}")
        return self.adopt(_with_blueprint(copy.copy(model), blueprint))  # a shallow copy: the model stays as it is

    def adopts(self, model: nn.Module) -> bool:
        return "attnrx_blueprint" in vars(model)

    def reader(self, source: nn.Module) -> Reader:
        return _blueprint(source).reader

    def origin(self, model: nn.Module) -> Origin:
        blueprint = _blueprint(model)
        reader = blueprint.reader
        # A round trip: it fails for what JSON cannot hold, and turns tuples into lists, as loading will.
        try:
            described = json.loads(json.dumps(to_dict(reader)))
        except (TypeError, InvalidInput) as error:
            raise NotSupported(f"the arguments of {blueprint.name} cannot be saved as JSON ({error}).") from error
        return Origin(blueprint.name, {"reader": described}, image_shape(reader.input_shape), reader.mean, reader.std)

    def create(self, architecture: str, arguments: Mapping[str, Any]) -> nn.Module:
        """Creates the class from its arguments, or calls the factory.

        Raises:
            NotSupported: The class has not been imported, and there is no factory.
            UserCodeError: The factory raised an exception.
        """
        reader: Reader = from_dict(arguments["reader"], (Reader,), "reader")
        factory, own = self.factory or imported_class(architecture), dict(reader.arguments)
        if factory is None:
            raise NotSupported(
                f"the class {architecture} of this model has not been imported: import it first, or give a "
                "function that creates it, attnrx.load(folder, factory=...)."
            )
        model = created_by(factory, architecture, own)
        unsaved = unsaved_buffers(model, meta=True)
        if unsaved:  # the module itself computes their values: it is created once more, on the CPU
            with torch.device("cpu"), torch.random.fork_rng(devices=[]):
                computed = factory(**own)
            for path, buffers in unsaved.items():
                for name in buffers:
                    model.get_submodule(path)._buffers[name] = computed.get_submodule(path)._buffers[name]
        return _with_blueprint(model, Blueprint(reader, factory, architecture))

    def library_model(self, model: nn.Module) -> nn.Module:
        adopted = self._adopted(model)
        return ModuleFamily(_blueprint(adopted.source).factory)._created(adopted.origin)


def created_by(factory: Factory, name: str, arguments: Mapping[str, Any] | None = None) -> nn.Module:
    """Returns the module that a class or a factory of the user's creates.

    Raises:
        InvalidInput: It takes other arguments, or returns no module.
        UserCodeError: It raised an exception.
    """
    try:
        model = factory(**(arguments or {}))
    except AttnrxError:
        raise
    except Exception as error:
        if isinstance(error, TypeError) and arguments is not None:
            raise InvalidInput(
                f"{name} could not be created again with {arguments}: {error}. Give its arguments, "
                "attnrx.Reader(arguments={...}, ...), or a factory that needs none: attnrx.load(..., factory=...)."
            ) from error
        raise UserCodeError(f"the factory of {name} raised {type(error).__name__}: {described_error(error)}") from error
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"the factory of {name} returned {described(model)}: give one that returns the model.")
    return model


def _with_blueprint(model: nn.Module, blueprint: Blueprint) -> nn.Module:
    # In __dict__, which shallow and deep copies of the model have too.
    model.__dict__["attnrx_blueprint"] = blueprint
    return model


def _blueprint(source: nn.Module) -> Blueprint:
    return source.__dict__["attnrx_blueprint"]


def imported_class(name: str) -> type[nn.Module] | None:
    """Returns an imported class of modules by its name "module:class"; None where there is none."""
    # Only modules that are imported already: a name from a file must not run the code of a module.
    module, _, path = name.partition(":")
    target: Any = sys.modules.get(module)
    for part in path.split("."):
        target = getattr(target, part, None)
    return target if isinstance(target, type) and issubclass(target, nn.Module) else None
