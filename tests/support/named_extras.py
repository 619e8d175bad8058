"""Runs a file of Python where the base dependencies of attnrx and those of some extras can be imported, and no others.

    python tests/support/named_extras.py EXTRAS FILE

The environment has more than a user of these extras installs; imports of all other distributions are refused.
"""

import importlib.metadata
import re
import runpy
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from packaging.requirements import Requirement


def named(extras: Sequence[str]) -> set[str]:
    """Returns the distributions that `pip install attnrx[EXTRAS]` installs, their dependencies included."""
    waiting: list[tuple[str, tuple[str, ...]]] = [("attnrx", tuple(extras))]
    found: dict[str, set[str]] = {}
    while waiting:
        name, wanted = waiting.pop()
        key = _key(name)
        if key in found and set(wanted) <= found[key]:
            continue
        found[key] = found.get(key, set()) | set(wanted)
        try:
            requirements = importlib.metadata.requires(name) or ()
        except importlib.metadata.PackageNotFoundError:  # for another platform
            continue
        for text in requirements:
            requirement = Requirement(text)
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in (*wanted, "")):
                waiting.append((requirement.name, tuple(requirement.extras)))
    return set(found)


def _key(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


class Refusing(MetaPathFinder):
    """Refuses the modules of all distributions but the named ones."""

    def __init__(self, extras: Sequence[str]):
        self.finders: list[Any] = list(sys.meta_path)
        allowed = named(extras)
        # A module of a namespace has several distributions; one that has none is of the standard library or ours.
        self.refused = {
            module
            for module, owners in importlib.metadata.packages_distributions().items()
            if not {_key(owner) for owner in owners} & allowed
        }

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        # None and not an error: libraries look for others with importlib.util.find_spec.
        if fullname.partition(".")[0] in self.refused:
            return None
        specs = (finder.find_spec(fullname, path, target) for finder in self.finders)
        return next((spec for spec in specs if spec is not None), None)

    def find_distributions(self, context: Any = None) -> Iterator[importlib.metadata.Distribution]:
        for finder in self.finders:
            if hasattr(finder, "find_distributions"):
                yield from finder.find_distributions(context)


def main(extras: str, file: str) -> None:
    finder = Refusing([extra for extra in extras.split(",") if extra])
    # What was imported by this file itself.
    for module in [name for name in sys.modules if name.partition(".")[0] in finder.refused]:
        del sys.modules[module]
    sys.meta_path[:] = [finder]
    runpy.run_path(file, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
