"""Child processes: the only module that starts any."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(os.sep).absolute()
POSIX = os.name == "posix"


def start_python(module: str, variables: Mapping[str, str]) -> subprocess.Popen[str]:
    """Starts a process of this interpreter that calls `serve()` of a module, and searches modules where this one does:
    in the current folder last, and only if this one does too.

    Args:
        module: The name of the module.
        variables: Added to the environment.

    Returns:
        The process, with pipes as stdin and stdout.
    """
    absolute = [entry for entry in sys.path if Path(entry).is_absolute()]
    relative = [str(Path(entry).absolute()) for entry in sys.path if entry not in absolute]
    return subprocess.Popen(
        [sys.executable, "-P", "-c", f"import sys; sys.path += {relative}; from {module} import serve; serve()"],
        # The two variables are also for processes that libraries start there, e.g. torch's compiler.
        env={**os.environ, **variables, "PYTHONPATH": os.pathsep.join(absolute), "PYTHONSAFEPATH": "1"},
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # A session of its own: its end reaches its forks too, and Ctrl-C reaches this process alone.
        start_new_session=POSIX,
    )


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
