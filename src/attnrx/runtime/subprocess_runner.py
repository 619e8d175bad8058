"""Calls of a function in a new process, so that measurements do not depend on the state of this process."""

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

# By default glibc returns large free blocks to the operating system and faults them in again page by page. This cost is
# not the model's, and it varied by a tenth within a quarter of an hour. Other systems ignore these two variables.
KEEPS_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}

_CALLED, _RETURNED = "called", "returned"


def run_in_subprocess(function: Callable[..., Value], *arguments: Any, on_line: Callable[[str], None] = print) -> Value:
    """Calls a module-level function in a new process with the same number of threads, and returns its value.

    The process does not return freed memory to the system (KEEPS_MEMORY), like services with their own allocator.
    `on_line` is called with every line that the function prints. Function, arguments and result are pickled, because
    they may contain modules of any library, and are exchanged in a private temporary folder.

    Raises:
        NotSupported: An argument cannot be pickled, such as a model of a class that no module defines; or the process
            failed.
    """
    with tempfile.TemporaryDirectory(prefix="attnrx-") as folder:
        try:
            (Path(folder) / _CALLED).write_bytes(pickle.dumps((function, arguments, torch.get_num_threads())))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise NotSupported(
                f"{function.__name__} cannot be called in a new process, because its arguments cannot be pickled "
                f"({error}). Define the classes and functions of the model in a module, or measure in this process "
                "(in_subprocess=False)."
            ) from error
        # PYTHONPATH: the pickled classes may come from any folder of this process's path.
        environment = {**os.environ, **KEEPS_MEMORY, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-c", f"from attnrx.runtime.subprocess_runner import serve; serve({folder!r})"]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                on_line(line.rstrip("\n"))
        returned = Path(folder) / _RETURNED
        if process.returncode or not returned.exists():
            raise NotSupported(
                f"the process that was to run {function.__name__} ended with code {process.returncode}; see its output "
                "above. Free memory, or measure in this process (in_subprocess=False)."
            )
        value, failed = pickle.loads(returned.read_bytes())
    if failed is not None:
        raise NotSupported(failed)
    return value


def call_in_subprocess_if(
    function: Callable[..., Value], *arguments: Any, in_subprocess: bool, on_line: Callable[[str], None] = print
) -> Value:
    """Calls a function in a new process if `in_subprocess`, else in this one."""
    return run_in_subprocess(function, *arguments, on_line=on_line) if in_subprocess else function(*arguments)


def serve(folder: str) -> None:
    """Runs in the new process: reads the call from the folder and writes its result there."""
    function, arguments, threads = pickle.loads((Path(folder) / _CALLED).read_bytes())
    torch.set_num_threads(threads)
    try:
        returned = function(*arguments), None
    except AttnrxError as error:
        returned = None, str(error)
    (Path(folder) / _RETURNED).write_bytes(pickle.dumps(returned))
