"""The commands, one file each: `SUMMARY`, `EXAMPLE`, `add(parser)` and `run(arguments, log)`.

The modules access attnrx as `rx.NAME`, which is imported on first use, so that --help is fast. Other packages add
commands by entry points of the group `attnrx.commands`, each naming such a module.
"""

import importlib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from types import ModuleType

CORE = (
    "shrink",
    "elastic",
    "train",
    "diagnose",
    "prescribe",
    "realize",
    "verify",
    "export",
    "push",
    "report",
    "costs",
)


@cache
def command_modules() -> Mapping[str, str]:
    """Returns the module name of every command, those of other packages last."""
    plugins = {entry.name: entry.value for entry in entry_points(group="attnrx.commands")}
    # Sorted, because the order of entry points depends on how the packages were installed. No other package replaces a
    # command of attnrx.
    others = {name: module for name, module in sorted(plugins.items()) if name not in CORE}
    return {name: f"attnrx.cli.commands.{name}" for name in CORE} | others


def command_module(name: str) -> ModuleType:
    return importlib.import_module(command_modules()[name])
