"""Registries, which map names to objects (things). For example, a registry maps the names of rules to their classes.

    RULES = Registry[type[Rule]]("rule", TotalRank, UniformRank)
    RULES["total_rank"]

    @RULES.register
    class Mine(Rule): ...

Other packages register things with the decorator, in a module that they declare as an entry point.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, cast

from attnrx.support.errors import InvalidInput, UnknownName
from attnrx.support.optional import import_plugins

Thing = TypeVar("Thing")
Registered = TypeVar("Registered")


def text_name(thing: Any) -> str:
    """Returns the name under which a thing is registered. A class without `name` gets its class name in snake case."""
    if not isinstance(thing, type):
        return str(thing.name)
    own = vars(thing).get("name")  # vars, because a subclass must not inherit the name
    return own if isinstance(own, str) else re.sub(r"(?<=[a-z])(?=[A-Z])", "_", thing.__name__).lower()


class Registry(Mapping[str, Thing]):
    """A mapping from names to objects (things) of one kind. `noun` names the kind in messages, e.g. "rule".

    Other packages register their things in modules, and declare these modules as entry points of the group `group`.
    attnrx imports the modules when a name is unknown, and when all names are listed.
    """

    def __init__(
        self, noun: str, *things: Thing, named: Mapping[str, Thing] | None = None, group: str = "attnrx.parts"
    ):
        self.noun, self.group = noun, group
        self._things: dict[str, Thing] = {**{text_name(thing): thing for thing in things}, **(named or {})}

    def register(self, thing: Registered, name: str = "") -> Registered:
        """Adds a thing under `name`, or under its own name (`text_name`). Returns the thing, as a decorator must.

        Raises:
            InvalidInput: Another thing has this name.
        """
        name, things = name or text_name(thing), cast("dict[str, Any]", self._things)
        # Classes are compared by their paths, because a notebook cell that runs again defines its class again.
        if repr(things.get(name, thing)) != repr(thing):
            raise InvalidInput(f"the {self.noun} {name} exists already; choose another name.")
        things[name] = thing
        return thing

    @property
    def loaded(self) -> tuple[Thing, ...]:
        """The things that are registered so far. Entry points of other packages are not imported."""
        return tuple(self._things.values())

    def __getitem__(self, name: str) -> Thing:
        """Returns the thing with this name.

        Raises:
            UnknownName: No thing has this name. The message suggests similar names.
        """
        if name not in self:
            raise UnknownName(self.noun, name, self)
        return self._things[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self._things[name] if name in self else default

    def __contains__(self, name: object) -> bool:
        if name not in self._things:
            import_plugins(self.group)
        return name in self._things

    def __iter__(self) -> Iterator[str]:
        import_plugins(self.group)
        return iter(self._things)

    def __len__(self) -> int:
        import_plugins(self.group)
        return len(self._things)
