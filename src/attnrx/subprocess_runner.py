"""A function in a process of its own: what it measures does not depend on what this process did before."""

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from attnrx.errors import AttnrxError, NotSupported

Value = TypeVar("Value")

# glibc gives large blocks back to the operating system as soon as they are free, and takes them anew page by page. What
# that costs is not the model's, and differed by a tenth from one quarter of an hour to the next. Other systems have no
# use for these two.
KEEPS_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}

_CALLED, _RETURNED = "called", "returned"


def run_in_subprocess(function: Callable[..., Value], *arguments: Any, on_line: Callable[[str], None] = print) -> Value:
    """Calls a function of a module with these arguments in a new process, with as many threads, and returns its value.

    The process keeps the memory that it once took, as services with an allocator of their own do (KEEPS_MEMORY).
    `on_line` is told every line that the function prints. What the two say to each other is pickled, because a model of
    any library and a function must pass; it lies in a folder that only they have, and is gone with the call.

    Raises:
        NotSupported: An argument, such as a model of a class that no module defines, cannot be sent to another process;
            or the process did not end well.
    """
    with tempfile.TemporaryDirectory(prefix="attnrx-") as folder:
        try:
            (Path(folder) / _CALLED).write_bytes(pickle.dumps((function, arguments, torch.get_num_threads())))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise NotSupported(
                f"{function.__name__} cannot be called in a process of its own, because what it needs cannot be sent "
                f"there ({error}). Define the classes and functions of the model in a module, or measure in this "
                "process (in_subprocess=False)."
            ) from error
        known = {**os.environ, **KEEPS_MEMORY, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-c", f"from attnrx.subprocess_runner import serve; serve({folder!r})"]
        with subprocess.Popen(command, env=known, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                on_line(line.rstrip("\n"))
        returned = Path(folder) / _RETURNED
        if process.returncode or not returned.exists():
            raise NotSupported(
                f"the process that was to run {function.__name__} ended with code {process.returncode}; what it said "
                "stands above. Free memory, or measure in this process (in_subprocess=False)."
            )
        value, failed = pickle.loads(returned.read_bytes())
    if failed is not None:
        raise NotSupported(failed)
    return value


def call_in_subprocess_if(
    function: Callable[..., Value], *arguments: Any, in_subprocess: bool, on_line: Callable[[str], None] = print
) -> Value:
    """Calls a function in a new process, or in this one."""
    return run_in_subprocess(function, *arguments, on_line=on_line) if in_subprocess else function(*arguments)


def serve(folder: str) -> None:
    """Does what `run_in_subprocess` left in a folder, and leaves there what came out."""
    function, arguments, threads = pickle.loads((Path(folder) / _CALLED).read_bytes())
    torch.set_num_threads(threads)
    value, failed = None, None
    try:
        value = function(*arguments)
    except AttnrxError as error:
        failed = str(error)
    (Path(folder) / _RETURNED).write_bytes(pickle.dumps((value, failed)))
