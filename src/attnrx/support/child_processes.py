"""Child processes: the only module that starts any, and the program of those that run Python.

A child must run no code of the current folder, which may be anybody's, e.g. an unpacked data set with a file `json.py`.
So it starts in the root folder with `-P`, and its `sys.path` is that of this process without the current folder and
without relative entries. Modules that this process has already imported from those folders are imported from the same
files; no other file of these folders is.

Imports the standard library only, because the child runs this file before `attnrx` can be imported.
"""

import importlib
import importlib.abc
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

ROOT = Path(os.sep).absolute()
POSIX = os.name == "posix"


def _current_folder() -> str | None:
    try:
        return str(Path.cwd().resolve())
    except OSError:  # it was deleted
        return None


_STARTED_IN = _current_folder()


def start_python(
    module: str, imports: Sequence[str], variables: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Starts a process of this interpreter that calls `serve(imports, folder)` of a module.

    It works in the current folder, but imports nothing from it (see the text of this file).

    Args:
        module: The name of the module.
        imports: Names of modules for `serve` to import ahead.
        variables: Added to the environment.

    Returns:
        The process, with pipes as stdin and stdout.
    """
    excluded = _excluded_folders()
    path = [entry for entry in sys.path if Path(entry).is_absolute() and os.path.realpath(entry) not in excluded]
    # The two variables are also for processes that libraries start there, e.g. torch's compiler.
    environment = {**os.environ, **(variables or {}), "PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}
    process = subprocess.Popen(
        [sys.executable, "-P", str(Path(__file__).absolute())],
        env=environment,
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # A session of its own: `end_python` ends its forks too, and Ctrl-C reaches this process alone.
        start_new_session=POSIX,
    )
    assert process.stdin is not None
    found, folder = _imported_from(excluded), _current_folder()
    settings = {"modules": found, "folder": folder, "imports": list(imports), "module": module}
    process.stdin.write(json.dumps(settings) + "\n")
    process.stdin.flush()
    return process


def find_program(name: str) -> str | None:
    """Returns the absolute path of a program, or None; relative entries of PATH are skipped.

    A name with a separator, e.g. `./compiler`, is a path relative to the current folder.
    """
    found = shutil.which(name, path=_program_path())
    return None if found is None else str(Path(found).absolute())


def run_program(command: Sequence[str], timeout: int | float) -> subprocess.CompletedProcess[str]:
    """Runs a program, given by its absolute path, in the root folder, and returns its code and its output.

    Raises:
        OSError: It cannot be started, or has not ended after `timeout` seconds.
    """
    try:
        # In the root folder, because compilers read empty entries of CPATH and its like as the current folder.
        return subprocess.run(
            command,
            env={**os.environ, "PATH": _program_path()},
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout,
        )
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"{command[0]} timed out after {timeout} seconds") from error


def _program_path() -> str:
    entries = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return os.pathsep.join(entry for entry in entries if Path(entry).is_absolute())


def _excluded_folders() -> set[str]:
    """Returns the current folder, that of the start, and the relative entries of PYTHONPATH, which Python resolved."""
    relative = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if not Path(entry).is_absolute()]
    named = [str(Path(folder, entry)) for folder in (_STARTED_IN, _current_folder()) if folder for entry in relative]
    return {os.path.realpath(folder) for folder in (_STARTED_IN, _current_folder(), *named) if folder}


def _imported_from(folders: set[str]) -> dict[str, tuple[str | None, list[str] | None]]:
    """Returns file and folders of the top-level modules that this process imported from these folders, by name."""
    found: dict[str, tuple[str | None, list[str] | None]] = {}
    for name, module in list(sys.modules.items()):
        if "." in name or name in ("__main__", "__mp_main__"):
            continue
        file = getattr(module, "__file__", None)
        inside = [str(Path(each).absolute()) for each in getattr(module, "__path__", ())]
        # The folder that was searched: that of a module's file, or the one above a package.
        searched = [Path(each).parent for each in inside] or ([Path(file).absolute().parent] if file else [])
        if any(os.path.realpath(str(folder)) in folders for folder in searched):
            found[name] = (str(Path(file).absolute()) if file else None, inside or None)
    return found


class _ImportedModules(importlib.abc.MetaPathFinder):
    """Finds the modules that the parent process has imported from folders that are not searched here."""

    def __init__(self, modules: Mapping[str, tuple[str | None, list[str] | None]]):
        self.modules = modules

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        del path, target
        if fullname not in self.modules:
            return None
        file, folders = self.modules[fullname]
        if file is None:  # a namespace package
            spec = ModuleSpec(fullname, None, is_package=True)
            spec.submodule_search_locations = folders
            return spec
        return importlib.util.spec_from_file_location(fullname, file, submodule_search_locations=folders)


def _main() -> None:
    settings = json.loads(sys.stdin.readline())
    sys.meta_path.insert(0, _ImportedModules(settings["modules"]))
    # Relative paths in arguments and in the environment are those of the parent. Imports do not depend on it any more.
    importlib.import_module(settings["module"]).serve(settings["imports"], settings["folder"])


if __name__ == "__main__":
    _main()
