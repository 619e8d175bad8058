"""Recreates users' modules when a saved model is loaded, and prunes the parts around their Vision Transformer."""

import pkgutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from attnrx.support.errors import InvalidInput, NotSupported
from attnrx.support.shapes import Bool, Tensor
from attnrx.vit.models.families import LIBRARIES, family_of
from attnrx.vit.models.parts.mlp import Pair
from attnrx.vit.models.parts.record import record_of
from attnrx.vit.models.parts.surroundings import Cut, Surroundings
from attnrx.vit.models.users.reader import Factory, created_by, imported_class
from attnrx.vit.models.users.units import separate_pairs
from attnrx.vit.models.working.adopted import Adopted


def library_creation(model: nn.Module) -> Mapping[str, Any] | None:
    """Returns the arguments with which a library recreates a module, or None if no library can recreate it."""
    library = next((each for each in LIBRARIES.values() if each.adopts(model)), None)
    with suppress(NotSupported):  # its arguments cannot be saved
        stated = None if library is None else library.creation(model)
        return stated and {"library": library.name, **stated}  # type: ignore[union-attr]


def created_by_library(creation: Mapping[str, Any]) -> nn.Module:
    """Creates a module from a result of `library_creation`.

    Raises:
        UnknownName: The library has no such class.
        NotSupported: The library is not installed.
    """
    library = next(each for each in LIBRARIES.values() if each.name == creation["library"])
    return library.create(creation["architecture"], creation["arguments"])


def created_again(around: Surroundings, factory: Factory | None) -> nn.Module:
    """Recreates a user's module by calling its factory, its library or its class. Weights are not restored.

    Raises:
        NotSupported: The class has not been imported or needs arguments, and there is no factory.
        UserCodeError: The factory raised an exception.
        InvalidInput: The factory did not return a module.
    """
    if factory is None and around.creation is not None:
        create: Factory | None = partial(created_by_library, around.creation)
    else:
        create = factory or (imported_class(around.name) if around.by_class else None)
    # The module is created on the CPU even while models load on the meta device, because its code may read weights.
    with torch.device("cpu"):
        return created_by(create, around.name, around.needed)


def restate_creation_(adopted: Adopted) -> None:
    """Updates a working copy's description if its library or class would now create weights of other shapes.

    The shapes differ if the user changed the module after loading it. Loading the saved model then requires a factory.
    """
    around, plain = adopted.around, adopted.plain
    if around is None or plain is None or around.factory is not None:
        return
    if not around.needed.startswith("import") and around.creation is None:
        return
    creates = partial(created_by_library, around.creation) if around.creation else imported_class(around.name)
    sizes = {name: tensor.shape for name, tensor in plain.model.state_dict().items()}
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            created = {name: tensor.shape for name, tensor in creates().state_dict().items()}  # type: ignore[misc]
    except Exception:  # the code of a module raises errors of any type
        return
    inside = [f"{path}." for path in _changed_paths(adopted, around)]
    differs = {name for name in sizes.keys() | created.keys() if sizes.get(name) != created.get(name)}
    if any(not any(name.startswith(path) for path in inside) for name in differs):
        adopted.around = replace(around, creation=None, by_class=False)


def _changed_paths(adopted: Adopted, around: Surroundings) -> Iterator[str]:
    """Yields the paths of all parts whose sizes pruning may have changed."""
    path, family = around.path, family_of(adopted)
    for block in family.block_names(adopted):
        inside = block.removeprefix("source").lstrip(".")
        places = adopted.places.items()
        yield from {inside, *(place for each, place in places if each.startswith(f"{inside}."))}
    for pair in adopted.pairs:
        yield from (f"{path}.{each}".strip(".") for each in (pair.first, pair.second, *pair.between))
    for first, second, between, _ in around.cuts:
        yield from (first, second, *between)


def pairs_around(adopted: Adopted) -> tuple[Pair, ...]:
    """Returns pairs of layers outside the Vision Transformer with hidden units that can be pruned one by one.

    A hidden unit, such as a decoder channel, can be pruned if no other hidden unit is computed from it. Paths are
    relative to the working copy's `source`.
    """
    if not adopted.path or adopted.around is None or adopted.around.call != "forward":
        return ()
    return separate_pairs(adopted.source, adopted.input_shape, adopted.path)[0]


def keep_units_around_(adopted: Adopted, pair: Pair, keep: Bool[Tensor, "units"]) -> None:
    """Prunes a pair from `pairs_around` to the hidden units in `keep`, in place. The kept weights do not change."""
    around, family = adopted.around, family_of(adopted)
    assert around is not None
    cut = Cut(pair.first, pair.second, pair.between, int(keep.sum()))
    cut.keep_(adopted.source, keep)
    adopted.own = None
    adopted.around = replace(around, cuts=(*around.cuts, cut))
    family.count_(adopted)  # type: ignore[attr-defined]


def needed_to_load(model: nn.Module) -> str:
    """Returns what a user must do before `load` can recreate a saved model, or "" if nothing is needed."""
    record = record_of(model)
    around = model.around if isinstance(model, Adopted) else None if record is None else record.around
    return "" if around is None else around.needed


def named_function(name: str) -> Callable[..., nn.Module]:
    """Imports a function by its name in the form "module:function".

    Raises:
        InvalidInput: The function cannot be imported.
    """
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidInput(
            f"factory={name!r:.80} cannot be imported ({error}): give a function, or 'module:function' of one that "
            "creates the module."
        ) from error
