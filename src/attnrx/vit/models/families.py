"""The list of all model families, and functions that find a model's family. Each family reads one kind of model."""

from torch import nn

from attnrx.support.arguments import checked
from attnrx.support.errors import NotSupported
from attnrx.support.modules import outermost
from attnrx.support.registry import Registry
from attnrx.vit.models.family import Family, NamedFamily, require_ordinary_tensors
from attnrx.vit.models.libraries.adopted_family import AdoptedFamily
from attnrx.vit.models.libraries.huggingface_family import HuggingFaceFamily
from attnrx.vit.models.libraries.timm_family import TimmFamily
from attnrx.vit.models.libraries.tower_families import OpenClipFamily, TorchvisionFamily
from attnrx.vit.models.parts.module_costs import num_params
from attnrx.vit.models.parts.vit_parts import model_name
from attnrx.vit.models.users.reader import ModuleFamily, StructureFamily
from attnrx.vit.models.users.units import UnitsFamily

# Families for models of other libraries. The key is the prefix of a model name, e.g. timm in timm:NAME.
LIBRARIES: dict[str, AdoptedFamily] = {
    "timm": TimmFamily(),
    "hf": HuggingFaceFamily(),
    "torchvision": TorchvisionFamily(),
    "open_clip": OpenClipFamily(),
}
# All families, by the names that saved folders contain. Every family matches only its own models.
FAMILIES = Registry[Family]("model family", *LIBRARIES.values(), ModuleFamily(), StructureFamily(), UnitsFamily())


def known_family(model: nn.Module) -> Family | None:
    """Returns a loaded model's family, or None if attnrx has not loaded the model or does not support it."""
    # A family that has not been imported cannot have created the model, so it is not searched.
    return next((family for family in FAMILIES.loaded if family.matches(model)), None)


@checked()
def family_of(model: nn.Module) -> Family:
    """Returns the family of a model.

    Raises:
        NotSupported: The model belongs to no family, or has not been loaded with `attnrx.load`.
    """
    if (family := known_family(model)) is not None:
        return family
    if any(library.adopts(model) for library in LIBRARIES.values()):
        raise NotSupported(
            f"this {type(model).__name__} still has the attention of its own library: adopt it first with "
            "attnrx.load(model), which returns a copy with the same logits."
        )
    require_no_supported_part(model)
    if trunks_of(model):
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


def require_ordinary_weights(model: nn.Module) -> None:
    """Raises an error if attnrx cannot read, compare and save each weight of a model.

    Raises:
        NotSupported: Weights are shared, quantized or of another unsupported kind (`require_ordinary_tensors`).
        InvalidInput: Weights are on the meta device, or have several floating-point types.
    """
    family = known_family(model)
    require_ordinary_tensors(model, () if family is None else family.block_names(model))


def trunks_of(model: nn.Module) -> list[tuple[str, AdoptedFamily]]:
    """Returns the path and the family of each library model inside a module, starting with the largest model."""

    def library_of(part: nn.Module) -> AdoptedFamily | None:
        families = (family for family in LIBRARIES.values() if family.has_class_of(part))
        return next((family for family in families if not any(family.refusals(part))), None)

    return sorted(outermost(model, library_of), key=lambda each: -num_params(model.get_submodule(each[0])))


def require_no_supported_part(model: nn.Module) -> None:
    """Raises NotSupported if only a submodule of a module is supported. The message names the submodule's path."""
    for path, part in model.named_modules():
        if path and known_family(part) is not None:
            raise NotSupported(
                f"{model_name(model)} is not supported, but the {type(part).__name__} in it is: give "
                f"model.get_submodule({path!r})."
            )


def model_names() -> tuple[str, ...]:
    """Returns the names of all models that are built from attnrx's layers."""
    return tuple(name for family in _named_families() for name in family.names())


def own_family(name: str) -> NamedFamily | None:
    return next((family for family in _named_families() if name in family.names()), None)


def _named_families() -> list[NamedFamily]:
    return [family for family in FAMILIES.values() if isinstance(family, NamedFamily)]
