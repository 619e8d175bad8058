"""Parts of other packages, which register themselves when their modules are imported; names that were moved there."""

from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any


@cache
def import_plugins() -> None:
    """Imports the modules that the entry points of the group `attnrx.parts` name."""
    for entry in entry_points(group="attnrx.parts"):
        entry.load()


def moved(places: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a package: it raises AttributeError, with the new place of a name that was moved."""

    def missing(name: str) -> Any:
        if name in places:
            raise AttributeError(f"{name} was moved; use {places[name]} (CHANGELOG.md).")
        raise AttributeError(f"the package has no attribute {name!r}.")

    return missing
