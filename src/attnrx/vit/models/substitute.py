"""A model that takes the place of one of a library or a user: what is code for that one takes it too."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from attnrx.support.errors import NotSupported
from attnrx.support.modules import copy_module, is_traced


class _Refused(NotSupported, AttributeError):
    """A method of the library that a substitute refuses; `hasattr`, by which tracers look for methods, is False."""


class _OfOriginal:
    # In a class of its own: in one with methods that call `super()` the name is that of their cell.
    # Not for an exporter, which makes stand-ins of the class of every module where one has several names.
    __class__ = property(lambda self: type(self if is_traced() else _original(self)))  # type: ignore[assignment]


class Substitute(_OfOriginal, nn.Module):
    """A model around `original`, the module of a library or a user whose attention was replaced.

    `isinstance(model, C)` holds for the classes of the original too, and public attributes that the model lacks are
    those of the original: pipelines, trainers and loops test for both. `type(model)` is the class in attnrx.
    """

    original_name: ClassVar[str]
    """The name of the submodule."""
    save_model: ClassVar[Callable[[Path | str, nn.Module], Path]]
    """How a model is saved; set by `families`, which imports this module."""
    # Methods of the library that would write or change a model other than the one that attnrx describes.
    refused_methods: ClassVar[Mapping[str, str]] = {
        "push_to_hub": "save it with attnrx.save(model, folder), and publish that with attnrx.push_to_hub.",
        "from_pretrained": "open a folder with attnrx.load(folder).",
    }

    def __getattr__(self, name: str) -> Any:
        """Returns a public attribute of the original that this module does not have."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            original = _original(self)
            if name.startswith("_") or original is self:
                raise
            if name in self.refused_methods and hasattr(original, name):
                raise _Refused(f"{name} of an adopted model: {self.refused_methods[name]}") from None
            if name == "save_pretrained" and hasattr(original, name):
                return partial(_save_pretrained, self)  # not the original's, which writes another model
            return getattr(original, name)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        remove_capturing_(self)
        # By a function, because pickle compares the class of what `__newobj__` creates with `__class__`.
        return empty_module, (type(self),), self.__getstate__()


def empty_module(kind: type[nn.Module]) -> nn.Module:
    """Returns a model of this class without its contents, which pickle fills in."""
    return kind.__new__(kind)


def remove_capturing_(model: nn.Module) -> None:
    """Removes the hooks of transformers for hidden states, which it installs anew where they are requested.

    It never removes them itself, and they cannot be pickled.
    """
    for part in model.modules():
        vars(part).pop("_output_capturing_hooks_installed", None)
        for key in [key for key, hook in part._forward_hooks.items() if is_capturing(hook)]:
            del part._forward_hooks[key]


def is_capturing(hook: Any) -> bool:
    """Returns whether a hook is one of transformers for hidden states, which is idle unless they are requested."""
    return getattr(hook, "__name__", "") == "output_capturing_hook"


def _original(model: nn.Module) -> nn.Module:
    return vars(model).get("_modules", {}).get(type(model).original_name, model)  # type: ignore[attr-defined]


def _save_pretrained(
    model: Substitute, save_directory: Path | str, *, state_dict: Any = None, is_main_process: bool = True, **_: Any
) -> None:
    """Saves the model as `attnrx.save` does, without card and evidence, for `attnrx.load`.

    `state_dict` replaces its weights, and only the main process writes, as in transformers.
    """
    if not is_main_process:
        return
    if state_dict is not None:
        model = copy_module(model)
        model.load_state_dict(state_dict)
    type(model).save_model(save_directory, model)
