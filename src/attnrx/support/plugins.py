"""Parts of other packages, which register themselves when their modules are imported."""

from functools import cache
from importlib.metadata import entry_points


@cache
def import_plugins() -> None:
    """Imports the modules that the entry points of the group `attnrx.parts` name."""
    for entry in entry_points(group="attnrx.parts"):
        entry.load()
