"""Imports the optional libraries that attnrx's extras install, and plug-ins from other packages."""

import importlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from attnrx.support.errors import InvalidInput, NotSupported, UserCodeError


def required_module(module: str, extra: str, purpose: str, package: str = "") -> Any:
    """Imports a module of an optional library.

    Raises:
        NotSupported: The library is not installed. The message names the `purpose` and what to install, i.e. attnrx's
            `extra` or the `package`.
    """
    try:
        with unreported() if module.partition(".")[0] in REPORTING else nullcontext():
            return importlib.import_module(module)
    except ImportError as error:
        library, install = module.partition(".")[0], package or f"'attnrx[{extra}]'"
        # The message contains the original error, because an installed library may lack a library that it needs.
        raise NotSupported(f"{purpose} needs {library} ({error}): pip install {install}.") from error


# The libraries in REPORTING report every import and every conversion to their makers. For each report, OpenVINO forks
# this process, which slows down everything else. With the variables in UNREPORTED, the libraries report nothing.
REPORTING, UNREPORTED = ("openvino", "nncf"), {"CI": "true", "NNCF_CI": "1"}


@contextmanager
def unreported() -> Iterator[None]:
    """Disables the telemetry of OpenVINO and NNCF (reports on imports and conversions) within the context."""
    with ExitStack() as variables:
        for name, value in UNREPORTED.items():
            variables.enter_context(environment(name, value))
        yield


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """Sets an environment variable within the context, and restores its earlier value at the end."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        os.environ.update({} if before is None else {name: before})


def require_installed(extra: str, purpose: str, *libraries: str) -> None:
    """Raises NotSupported for a library that is not installed. No library is imported, because that takes seconds."""
    for library in libraries:
        if not is_installed(library):
            raise NotSupported(f"{purpose} needs {library}, which is not installed: pip install 'attnrx[{extra}]'.")


def is_installed(library: str) -> bool:
    try:
        return importlib.util.find_spec(library) is not None
    except ValueError:  # the module is in sys.modules, but has no specification
        return False


def installed_versions(*names: str) -> dict[str, str]:
    """Returns the versions of the named packages. Packages that are not installed are left out."""
    versions = {}
    for name in names:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


@cache
def import_plugins(group: str = "attnrx.parts") -> None:
    """Imports modules that other packages declare as entry points of `group`. They register e.g. their own rules."""
    # The entry points are sorted, because their order depends on how the packages were installed.
    for entry in sorted(importlib.metadata.entry_points(group=group)):
        entry.load()


def import_file(path: Path | str) -> ModuleType:
    """Runs a Python file as a module, which may register rules, losses and so on. A file is only run once.

    Raises:
        InvalidInput: The path is not a Python file.
        UserCodeError: The code in the file raises an error.
    """
    path = Path(path)
    name = f"attnrx_plugin_{path.stem}"
    known = sys.modules.get(name)
    if known is not None and known.__file__ == str(path):
        return known
    found = importlib.util.spec_from_file_location(name, path) if path.is_file() else None
    if found is None or found.loader is None:
        raise InvalidInput(f"{path} is no file of Python (NAME.py) that could be run as a plug-in; check the path.")
    # The module must be in sys.modules, because dataclasses look up their own module there.
    module = sys.modules[name] = importlib.util.module_from_spec(found)
    try:
        found.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, KeyboardInterrupt):
            raise
        raise UserCodeError(f"the plug-in {path} fails: {type(error).__name__}: {error}") from error
    return module
