"""The families by name: the family of a model, and fresh models by their names."""

from typing import Any

from torch import nn

from attnrx.support.errors import NotSupported, UnknownName
from attnrx.support.registry import Registry
from attnrx.vit.models.family import Family, NamedFamily
from attnrx.vit.models.libraries.adopted_family import AdoptedFamily
from attnrx.vit.models.libraries.huggingface_family import HuggingFaceFamily
from attnrx.vit.models.libraries.timm_family import TimmFamily
from attnrx.vit.models.libraries.tower_families import OpenClipFamily, TorchvisionFamily
from attnrx.vit.models.parts.vit_parts import model_name
from attnrx.vit.models.users.reader import ModuleFamily
from attnrx.vit.models.users.whole import WholeFamily

# The families of other libraries, by the prefix of a model name.
LIBRARIES: dict[str, AdoptedFamily] = {
    "timm": TimmFamily(),
    "hf": HuggingFaceFamily(),
    "torchvision": TorchvisionFamily(),
    "open_clip": OpenClipFamily(),
}
# By their names in saved folders. `family_of` takes the first that matches; each matches its own class of models only.
FAMILIES = Registry[Family]("model family", *LIBRARIES.values(), ModuleFamily(), WholeFamily(LIBRARIES))


def known_family(model: nn.Module) -> Family | None:
    """Returns the family of a model; None where it belongs to no family, or has not been adopted yet."""
    # Whose model it is, that has been imported.
    return next((family for family in FAMILIES.loaded if family.matches(model)), None)


def family_of(model: nn.Module) -> Family:
    """Returns the family of a model.

    Raises:
        NotSupported: The model belongs to no family, or has not been adopted yet.
    """
    if (family := known_family(model)) is not None:
        return family
    if any(library.adopts(model) for library in LIBRARIES.values()):
        raise NotSupported(
            f"this {type(model).__name__} still has the attention of its own library: adopt it first with "
            "attnrx.load(model), which returns a copy with the same logits."
        )
    require_no_supported_part(model)
    if WholeFamily(LIBRARIES).trunks_of(model):
        raise NotSupported(
            f"this {type(model).__name__} contains a Vision Transformer with the attention of its own library: adopt "
            "it first with attnrx.load(model), which returns a copy with the same outputs."
        )
    kinds = dict.fromkeys(f"{name.partition(':')[0]}:NAME" for name in model_names())
    raise NotSupported(
        f"{model_name(model)} is not supported; "
        f"use {', '.join(kinds)}, timm:NAME, hf:ID, torchvision:NAME, open_clip:NAME or a folder saved by attnrx. "
        "For a model of your own state where its parts are: attnrx.load(model, reader=attnrx.Reader(...))."
    )


def require_no_supported_part(model: nn.Module) -> None:
    """Raises NotSupported for a wrapper of any kind around a model of attnrx, with the path of that model."""
    for path, part in model.named_modules():
        if path and known_family(part) is not None:
            raise NotSupported(
                f"{model_name(model)} is not supported, but the {type(part).__name__} in it is: give "
                f"model.get_submodule({path!r})."
            )


def model_names() -> tuple[str, ...]:
    """Returns the names of all models that are built of attnrx's layers."""
    return tuple(name for family in _named_families() for name in family.names())


def own_family(name: str) -> NamedFamily | None:
    return next((family for family in _named_families() if name in family.names()), None)


def _named_families() -> list[NamedFamily]:
    return [family for family in FAMILIES.values() if isinstance(family, NamedFamily)]


def build_model(name: str, seed: int = 0, **changes: Any) -> nn.Module:
    """Builds a freshly initialized model from its name, e.g. `timm:vit_tiny_patch16_224`.

    `changes` override fields of its configuration. On the meta device the model has no weights; its costs can be
    computed.

    Args:
        name: The name of an attnrx model, or LIBRARY:NAME.
        seed: The seed of the weights of attnrx models.
        **changes: Fields of the configuration, or arguments of the library.

    Raises:
        UnknownName: There is no such model.
        InvalidInput: The changes do not fit.
    """
    library, _, architecture = name.partition(":")
    if library in LIBRARIES:
        return LIBRARIES[library].fresh(architecture, **changes)
    family = own_family(name)
    if family is None:
        raise UnknownName("model", name, (*model_names(), *(f"{library}:NAME" for library in LIBRARIES)))
    return family.fresh(name, seed, **changes)
