"""Loads and saves models. The source of a model is a saved folder, a name, a transformers folder or an instance."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from attnrx.support.arguments import checked
from attnrx.support.atomic_writes import ReplacedFiles
from attnrx.support.errors import AttnrxError, CheckpointError, InvalidInput, NotSupported, UnknownName, nearest
from attnrx.support.hub import NAME, download
from attnrx.support.modules import load_tensors_
from attnrx.support.records import from_dict
from attnrx.support.storage import read_tensors, require_finite_tensors
from attnrx.vit.models.boundary.adoption import adopt, adopt_any, adopted_instance
from attnrx.vit.models.boundary.whole import created_again, named_function, needed_to_load, restate_creation_
from attnrx.vit.models.boundary.working_copy import WORKING, library_form, plain_form, require_alike, working_copy
from attnrx.vit.models.checkpoint import is_model_folder, load_weights, save_weights
from attnrx.vit.models.families import FAMILIES, LIBRARIES, family_of, model_names, own_family, require_ordinary_weights
from attnrx.vit.models.libraries.huggingface_family import HuggingFaceFamily, is_transformers_folder
from attnrx.vit.models.parts.surroundings import Surroundings
from attnrx.vit.models.parts.vit_parts import reading_parts
from attnrx.vit.models.users.reader import Factory, ModuleFamily, Reader
from attnrx.vit.models.working.adopted import Adopted


def load_model(
    source: str | Path | nn.Module,
    seed: int = 0,
    weights: str | Path | None = None,
    pretrained: bool | None = None,
    *,
    trust: bool = False,
    reader: Reader | None = None,
    factory: Factory | str | None = None,
    inputs: Any = None,
    image_size: tuple[int, int] | None = None,
) -> nn.Module:
    """Loads a model from a saved folder, a name or an instance. Models of other libraries are converted by `adopt`.

    `attnrx.load` has the same arguments, and also loads elastic models (several sizes in one) and exported files.

    Returns:
        A new model. If you pass an instance of an attnrx model, it is returned unchanged.

    Raises:
        CheckpointError: The folder or the weights cannot be read, or the weights do not fit the model.
        UnknownName: There is no model of this name.
        NotSupported: The model has an unsupported feature, or its class is not supported.
        InvalidInput: You passed `weights` or `pretrained` for a source that does not accept them.
    """
    factory = named_function(factory) if isinstance(factory, str) else factory
    if isinstance(source, nn.Module):
        with reading_parts(source, "its parts"):
            if reader is None:
                return adopted_instance(source, factory, inputs, image_size)
            by_reader = ModuleFamily(factory)
            return adopt(by_reader, by_reader.marked(source, reader))
    # A source without a colon is a folder, even if it has the name of a library.
    library, name = str(source).split(":", 1) if ":" in str(source) else ("", "")
    if library in LIBRARIES and LIBRARIES[library].takes_weights:
        family = LIBRARIES[library]
        instance = family.instance(name, weights=weights, pretrained=pretrained)
        creation = {"library": family.name, "architecture": name, "arguments": {}}
        stated = family.input_format(name) if weights is None and pretrained is not False else {}
        return adopt_any(instance, creation=creation, **stated).eval()
    own = own_family(str(source)) if library and not pretrained else None
    if own is not None and own.takes_weights and weights is not None:
        return own.load(str(source), weights)
    is_saved = not library and is_model_folder(source)
    if pretrained is not None or (weights is not None and not is_saved):
        raise InvalidInput(
            f"load({str(source)!r}) takes no weights or pretrained; timm:NAME and torchvision:NAME take both, "
            "a folder saved by attnrx and some models of installed packages take weights."
        )
    if library == "hub":
        return load_folder(download(name), factory)
    if library == "hf":
        return _of_transformers(name, trust)
    # A colon may also be part of a path, e.g. C:\models. So if such a path exists, it is not read as a name.
    if isinstance(source, str) and ":" in source and not Path(source).exists():
        return build_model(source, seed).eval()
    if not is_saved and is_transformers_folder(source):
        return _of_transformers(source, trust)
    if isinstance(source, str) and not Path(source).exists():
        raise CheckpointError(f"{source!r:.200} is not a folder{_meant(source)}")
    return load_folder(source, factory, weights)


@checked()
def build_model(name: str, seed: int = 0, **changes: Any) -> nn.Module:
    """Builds the model of this name, e.g. `timm:vit_tiny_patch16_224`, with new random weights.

    On PyTorch's meta device, the model is created without weights, which is enough to compute its costs.

    Args:
        name: The name of an attnrx model, or LIBRARY:NAME.
        seed: The seed of the random weights in attnrx models. Models of other libraries always use seed 0.
        **changes: Configuration fields of an attnrx model, or arguments that the library accepts for this model.

    Raises:
        UnknownName: There is no such model.
        InvalidInput: The model does not accept one of the changes.
    """
    library, _, architecture = name.partition(":")
    if library in LIBRARIES:
        source = LIBRARIES[library].initialized(architecture, **changes)
        if next(source.parameters()).is_meta:
            return LIBRARIES[library].without_weights(source)
        return adopt(LIBRARIES[library], source).eval()
    family = own_family(name)
    if family is None:
        raise UnknownName("model", name, (*model_names(), *(f"{library}:NAME" for library in LIBRARIES)))
    return family.fresh(name, seed, **changes)


def save_model(
    folder: Path | str,
    model: nn.Module,
    notes: dict[str, Any] | None = None,
    write_beside: Callable[[Path], object] | None = None,
    parts: ReplacedFiles | None = None,
) -> Path:
    """Saves a model of a supported family as a folder that `load_model` reads.

    An earlier model in the folder is replaced atomically, together with all of its files. `parts` describes which files
    to replace. The default is `PARTS` of `models.checkpoint`. `write_beside` is called with the temporary folder, and
    can write more files there. Before anything is replaced, the new folder is loaded and compared with `model`.

    Raises:
        NotSupported: The model belongs to no family, is quantized, or has blocks with shared weights. Also raised if
            the saved model differs from `model`, because `model` was changed in a way that a folder cannot store.
    """
    given, model = model, working_copy(model)
    family: Any = family_of(model)
    if isinstance(model, Adopted):
        family.refresh_(model) if model.around is None else restate_creation_(model)

    def write(new: Path) -> None:
        if write_beside is not None:
            write_beside(new)
        if "factory" not in needed_to_load(model):  # a factory is a user's function, which this function does not get
            require_same(new, given, vars(getattr(model, "source", model)).get("attnrx_factory"))

    return save_weights(folder, model, family, notes, write, parts)


def require_same(folder: Path, model: nn.Module, factory: Factory | None = None) -> None:
    """Raises NotSupported if the saved model differs from `model` in its parts or its outputs for random images."""
    remedy = (
        "was not saved: it was changed after it was made or loaded in a way that a folder cannot hold. Make the change "
        "in the arguments of the model, or state a function that creates it: attnrx.load(module, factory=...)."
    )
    model = plain_form(model) if WORKING in vars(model) else library_form(model)
    try:
        saved = load_folder(folder, factory)
    except AttnrxError as error:
        why = str(error).replace(f"{folder}/", "").replace(str(folder), "the folder")
        raise NotSupported(f"{type(model).__name__} {remedy} What was written cannot be loaded: {why}") from error
    saved = library_form(saved)
    require_alike(model, saved, remedy)
    # Outputs do not show every setting. The text of the parts also shows activations, epsilons and dropout rates.
    for own, other in zip(repr(model).splitlines(), repr(saved).splitlines(), strict=False):
        if own != other:
            raise NotSupported(f"{type(model).__name__} {remedy} It has {own.strip()}, the folder {other.strip()}.")


def _meant(name: str) -> str:
    """Returns the end of an error message about a missing folder: names that the user may have meant."""
    known = []
    for library, family in LIBRARIES.items():
        with suppress(NotSupported):  # the library is not installed
            known += [f"{library}:{name}"] if family.has(name) else []
    if known or NAME.fullmatch(name):
        return f"; did you mean {' or '.join(map(repr, known or [f'hf:{name}', f'hub:{name}']))}?"
    names = [*model_names(), *(f"{library}:NAME" for library in LIBRARIES)]
    return f", and it names no model; {nearest(name, names)}"


def _of_transformers(name: Path | str, trust: bool) -> nn.Module:
    family = HuggingFaceFamily()
    model, stated = family.read(name, trust)
    return adopt(family, model, **stated).eval()


def load_folder(folder: Path | str, factory: Factory | None = None, weights: Path | str | None = None) -> nn.Module:
    """Loads a working copy of a saved model. Weights from the file `weights`, if given, replace the saved weights.

    Raises:
        CheckpointError: The folder contains no model, or a damaged model.
        NotSupported: The saved module can only be created by the user's function, but `factory` is None.
    """

    def build(family: Any, description: Mapping[str, Any]) -> nn.Module:
        if "around" not in description:
            # The family instance is shared. If it stored the factory, all models loaded later would use it.
            return (ModuleFamily(factory) if isinstance(family, ModuleFamily) else family).build(description)
        around = from_dict(description["around"], Surroundings)
        return family.built_inside(created_again(around, factory), description)

    model = load_weights(folder, FAMILIES, build)
    return model if weights is None else _with_weights(model, Path(weights))


def _with_weights(model: nn.Module, weights: Path) -> nn.Module:
    """Loads weights from another file into a model that was loaded from a folder, e.g. after further training.

    Raises:
        CheckpointError: The weights file does not exist, or its weights do not fit the model.
    """
    source = weights / "model.safetensors" if weights.is_dir() else weights
    if source.suffix != ".safetensors" or not source.is_file():
        raise CheckpointError(
            f"weights={str(weights)!r}: give a .safetensors file, or a folder with model.safetensors."
        )
    tensors: Mapping[str, Tensor] = read_tensors(source)
    require_finite_tensors(tensors, str(source))
    # The file's names are either the model's own names, or the names in files that attnrx writes.
    model = model if tensors.keys() == model.state_dict().keys() else library_form(model)
    if tensors.keys() != model.state_dict().keys():
        names = family_of(model).saved_names(model)
        tensors = {names.get(name, name): tensor for name, tensor in tensors.items()}
    try:
        load_tensors_(model, tensors)
        require_ordinary_weights(model)
    except Exception as error:  # torch raises several types
        raise CheckpointError(f"the weights of {source} do not fit the model of the folder ({error}).") from error
    return working_copy(model.eval())
