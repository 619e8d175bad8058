"""The families by name: find the family of a model; build, load and save models."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from attnrx.support.atomic_writes import Parts
from attnrx.support.errors import AttnrxError, CheckpointError, InvalidInput, NotSupported, UnknownName, nearest
from attnrx.support.hub import NAME, download
from attnrx.support.modules import copy_module
from attnrx.support.optional import import_plugins
from attnrx.vit.models.adopted_family import AdoptedFamily
from attnrx.vit.models.adoption_proof import require_plain_code
from attnrx.vit.models.checkpoint import is_model_folder, load_weights, save_weights
from attnrx.vit.models.family import Family, NamedFamily, require_ordinary_weights
from attnrx.vit.models.huggingface_family import HuggingFaceFamily, is_transformers_folder
from attnrx.vit.models.module_inputs import ATTRIBUTE, ModuleInputs
from attnrx.vit.models.parts import model_name, reading_parts
from attnrx.vit.models.reader import Factory, ModuleFamily, Reader
from attnrx.vit.models.substitute import Substitute
from attnrx.vit.models.timm_family import TimmFamily
from attnrx.vit.models.tower_families import OpenClipFamily, TorchvisionFamily
from attnrx.vit.models.whole import WholeFamily, named_function

# The families of other libraries, by the prefix of a model name.
LIBRARIES: dict[str, AdoptedFamily] = {
    "timm": TimmFamily(),
    "hf": HuggingFaceFamily(),
    "torchvision": TorchvisionFamily(),
    "open_clip": OpenClipFamily(),
}
# The registered families of models that are built of attnrx's layers.
OWN: list[NamedFamily] = []
# `family_of` takes the first that matches; each matches its own class of models only.
FAMILIES: list[Family] = [*LIBRARIES.values(), ModuleFamily(), WholeFamily(LIBRARIES)]


def register_family(family: NamedFamily) -> None:
    """Makes a family of models that are built of attnrx's layers known, by its names and in saved folders.

    Raises:
        InvalidInput: Another family has its name.
    """
    if any(each.name == family.name for each in FAMILIES):
        raise InvalidInput(f"the family {family.name} exists already; choose another name.")
    OWN.append(family)
    FAMILIES.append(family)


def known_family(model: nn.Module) -> Family | None:
    """Returns the family of a model; None where it belongs to no family, or has not been adopted yet."""
    return next((family for family in FAMILIES if family.matches(model)), None)


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
    _require_no_supported_part(model)
    if WholeFamily(LIBRARIES).trunks_of(model):
        raise NotSupported(
            f"this {type(model).__name__} contains a Vision Transformer with the attention of its own library: adopt "
            "it first with attnrx.load(model), which returns a copy with the same outputs."
        )
    raise NotSupported(
        f"{model_name(model)} is not supported; "
        f"use {', '.join(model_names())}, timm:NAME, hf:ID, torchvision:NAME, open_clip:NAME or a folder saved by "
        "attnrx. For a model of your own state where its parts are: attnrx.load(model, reader=attnrx.Reader(...))."
    )


def _require_no_supported_part(model: nn.Module) -> None:
    """Raises NotSupported for a wrapper of any kind around a model of attnrx, with the path of that model."""
    for path, part in model.named_modules():
        if path and known_family(part) is not None:
            raise NotSupported(
                f"{model_name(model)} is not supported, but the {type(part).__name__} in it is: give "
                f"model.get_submodule({path!r})."
            )


def accepting(model: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    """Returns the model, or a copy of it that takes inputs of this shape: channels, height and width.

    Position embeddings are interpolated by the code of the model's library. A token policy keeps the same shares of
    the patches.

    Raises:
        NotSupported: The library does not interpolate the position embeddings of this model.
        InvalidInput: Patches do not tile such images, or a token policy would keep none of them.
    """
    family = family_of(model)
    own = family.input_shape(model)
    if len(shape) != 3 or own == shape:
        return model
    other = copy_module(model)
    if own[0] != shape[0]:
        return other if family.accepts_(other, shape) else model  # other channels are refused where it is run
    family.resize_(other, *shape[1:])
    return other


def at_size_of(model: nn.Module, other: nn.Module) -> nn.Module:
    """Returns the model, or a copy of it that takes images of the size of another model of the same channels.

    Raises:
        NotSupported: The library does not interpolate the position embeddings of this model.
        InvalidInput: Patches do not tile such images.
    """
    # One without a family is a file of a runtime, or any other module.
    family = known_family(other)
    return model if family is None or known_family(model) is None else accepting(model, family.input_shape(other))


def known_families() -> tuple[Family, ...]:
    """Returns the families of this package and the registered ones, those of other packages among them."""
    import_plugins()
    return tuple(FAMILIES)


def model_names() -> tuple[str, ...]:
    """Returns the names of all models that are built of attnrx's layers."""
    import_plugins()
    return tuple(name for family in OWN for name in family.names())


def _own_family(name: str) -> NamedFamily | None:
    import_plugins()
    return next((family for family in OWN if name in family.names()), None)


def build_model(name: str, seed: int = 0, **changes: Any) -> nn.Module:
    """Builds a freshly initialized model from its name, e.g. `svda:cifar10` or `timm:vit_tiny_patch16_224`.

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
    family = _own_family(name)
    if family is None:
        raise UnknownName("model", name, (*model_names(), *(f"{library}:NAME" for library in LIBRARIES)))
    return family.fresh(name, seed, **changes)


def load_model(
    source: str | Path | nn.Module,
    seed: int = 0,
    weights: str | Path | None = None,
    pretrained: bool | None = None,
    *,
    reader: Reader | None = None,
    factory: Factory | str | None = None,
    inputs: Any = None,
) -> nn.Module:
    """Returns a model from a saved folder, a name or an instance; an instance of another library is adopted.

    The arguments are those of `attnrx.load`, which also reads elastic models and files of runtimes.

    Returns:
        The model; a new one, except an instance of an attnrx model, which is returned as it is.

    Raises:
        CheckpointError: The folder or the weights cannot be read, or do not fit.
        UnknownName: There is no model of this name.
        NotSupported: The model has an unsupported feature, or belongs to no family.
        InvalidInput: `weights` or `pretrained` for a source that takes none.
    """
    factory = named_function(factory) if isinstance(factory, str) else factory
    if isinstance(source, nn.Module):
        with reading_parts(source, "its parts"):
            if reader is None:
                return _adopt_if_foreign(source, factory, inputs)
            return ModuleFamily(factory).read(source, reader)
    # Without a colon it is a folder, also one that is called like a library.
    library, name = str(source).split(":", 1) if ":" in str(source) else ("", "")
    if library in LIBRARIES and LIBRARIES[library].takes_weights:
        family = LIBRARIES[library]
        instance = family.instance(name, weights=weights, pretrained=pretrained)
        named = {"library": family.name, "architecture": name, "arguments": {}}
        stated = family.input_format(name) if weights is None and pretrained is not False else {}
        return _adopt(instance, named=named, **stated).eval()
    own = _own_family(str(source)) if library and not pretrained else None
    if own is not None and own.takes_weights and weights is not None:
        return own.load(str(source), weights)
    is_saved = not library and is_model_folder(source)
    if pretrained is not None or (weights is not None and not is_saved):
        raise InvalidInput(
            f"load({str(source)!r}) takes no weights or pretrained; timm:NAME and torchvision:NAME take both, "
            "lvvit:SIZE and a folder saved by attnrx take weights."
        )
    if library == "hub":
        return _load_folder(download(name), factory)
    if library == "hf":
        return HuggingFaceFamily().load(name)
    # A colon may also be part of a path, e.g. C:\models: a folder that exists has precedence over a name.
    if isinstance(source, str) and ":" in source and not Path(source).exists():
        return build_model(source, seed).eval()
    if is_transformers_folder(source):
        return HuggingFaceFamily().load(source)
    if isinstance(source, str) and not Path(source).exists():
        raise CheckpointError(f"{source!r:.200} is not a folder{_meant(source)}")
    return _load_folder(source, factory, weights)


def _meant(name: str) -> str:
    """Returns the end of a message about a name that is no folder: what may have been meant."""
    known = []
    for library, family in LIBRARIES.items():
        with suppress(NotSupported):  # the library is not installed
            known += [f"{library}:{name}"] if family.has(name) else []
    if known or NAME.fullmatch(name):
        return f"; did you mean {' or '.join(map(repr, known or [f'hf:{name}', f'hub:{name}']))}?"
    names = [*model_names(), *(f"{library}:NAME" for library in LIBRARIES)]
    return f", and it names no model; {nearest(name, names)}"


def _load_folder(folder: Path | str, factory: Factory | None, weights: Path | str | None = None) -> nn.Module:
    # The shared instance has no factory, and must not get one: it would be used for every model loaded later.
    others = (family for family in known_families() if not isinstance(family, ModuleFamily | WholeFamily))
    return load_weights(folder, (*others, ModuleFamily(factory), WholeFamily(LIBRARIES, factory)), weights)


def _adopt_if_foreign(model: nn.Module, factory: Factory | None, inputs: Any = None) -> nn.Module:
    if known_family(model) is not None:
        return model
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):  # its copies on devices are not ours
        raise NotSupported(
            f"{model_name(model)} is not supported, but the {type(model.module).__name__} in it is: give "
            "model.get_submodule('module')."
        )
    if inputs is None:
        return _adopt(model, factory)
    vars(model)[ATTRIBUTE] = ModuleInputs.of(inputs)  # copies keep it
    try:
        return _adopt(model, factory)
    finally:
        del vars(model)[ATTRIBUTE]


def _adopt(
    model: nn.Module, factory: Factory | None = None, named: dict[str, Any] | None = None, **stated: Any
) -> nn.Module:
    """Adopts a model of a library, the largest Vision Transformer in a module, a structure that is found, or MLPs.

    `named` is how a library creates the model, `stated` the fields of its `Origin` that the model does not state.
    """
    whole, takes_images = WholeFamily(LIBRARIES, factory), ATTRIBUTE not in vars(model)
    library = next((each for each in LIBRARIES.values() if takes_images and each.adopts(model)), None)
    if library is None and takes_images:
        _require_no_supported_part(model)
    require_plain_code(model)
    require_ordinary_weights(model)
    refusals = () if library is None else tuple(library.refusals(model))
    units = partial(whole.adopt, model, "", whole.units, named=named)
    attempts: list[Callable[[], Any]]
    # The error that is shown: that of what the model is, and not that of the attempt to read something in it.
    shown = 0
    if (library is None or refusals) and (trunks := whole.trunks_of(model)):
        # The first that the module calls; its others stay as they are.
        attempts = [partial(whole.adopt, model, path, family, named=named) for path, family in trunks]
    elif library is None:
        found = whole.structure.found(model) if takes_images else None
        structured = [] if found is None else [partial(whole.adopt, model, found[1], whole.structure, found[0])]
        attempts, shown = [*structured, units, *([partial(family_of, model)] if takes_images else [])], -1
    elif any(refusal.is_of_class for refusal in refusals):
        attempts, shown = [units, partial(library.adopt, model)], -1
    else:  # the second: one that its library cannot create again, e.g. with a part of the user's own
        attempts = [partial(library.adopt, model, **stated), partial(whole.adopt, model, "", library, named=named)]
    errors: list[AttnrxError] = []
    for attempt in attempts:
        try:
            return attempt()
        except AttnrxError as error:
            if not errors and not isinstance(error, NotSupported):
                raise
            errors.append(error)
    if shown and len(errors) > 1:
        raise errors[-1] from errors[-2]
    raise errors[0]


def save_model(
    folder: Path | str,
    model: nn.Module,
    notes: dict[str, Any] | None = None,
    write_beside: Callable[[Path], object] | None = None,
    parts: Parts | None = None,
) -> Path:
    """Saves a model of a supported family as a folder that `load_model` reads.

    A model already in the folder is replaced atomically, together with all files that belong to it: `parts`, by default
    PARTS of `models.checkpoint`. `write_beside` is called with the temporary folder and writes further files of the new
    model.

    Raises:
        NotSupported: The model belongs to no family, or its weights cannot be stored one by one.
    """
    return save_weights(folder, model, family_of(model), notes, write_beside, parts)


Substitute.save_model = staticmethod(save_model)
