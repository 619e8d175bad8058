"""Child processes, which only this module starts: programs, and calls of functions in another process.

Measurements in another process do not depend on the state of this one.
"""

import ctypes
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch

from attnrx.support.atomic_writes import scratch_folder
from attnrx.support.errors import AttnrxError, NotSupported

Value = TypeVar("Value")

ROOT = Path(os.sep).absolute()
POSIX = os.name == "posix"
VARIABLES = {
    # By default glibc returns large free blocks to the operating system and faults them in again page by page. This
    # cost is not the model's, and it varied by a tenth within a quarter of an hour. Other systems ignore the two.
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    # A library that asks for CUDA devices while it is imported must not start CUDA, which no fork could use then.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
# Imported ahead in the process if they are loaded here: pickled models need them.
LIBRARIES = ("timm", "transformers", "attnrx", "attnrx_lab")

# Every call has its own process, with a fresh heap: a model was 15 % slower in the process that had measured a cost
# table than in a new one. It is forked from one that has imported everything, before any threads were started.
FORKS = sys.platform == "linux"
_PR_SET_PDEATHSIG = 1  # of prctl

ADVICE = (
    "Define the classes and functions of the model in a module, not in a script or a notebook, or measure in this "
    "process (in_subprocess=False)."
)

# The files of a call, and the line that ends its output: it starts with a zero byte, unlike any line of text.
_CALLED, _RETURNED, _DONE = "called", "returned", "\0done"


class Subprocess:
    """A Python process that runs calls; on Linux each call has its own fork.

    It keeps freed memory, like a service with its own allocator. Function, arguments and result are pickled, because
    they may contain modules of any library, and are exchanged in a private temporary folder. The process ends with this
    one, however it ends; on systems other than Linux, after the call that it runs. It searches modules where this one
    does: in the current folder last, and only if this one does, too.
    """

    def __init__(self):
        imports = [name for name in sys.modules if name.partition(".")[0] in LIBRARIES]
        absolute = [entry for entry in sys.path if Path(entry).is_absolute()]
        relative = [str(Path(entry).absolute()) for entry in sys.path if entry not in absolute]
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", f"import sys; sys.path += {relative}; from {__name__} import serve; serve()"],
            # The two variables are also for processes that libraries start there, e.g. torch's compiler.
            env={**os.environ, **VARIABLES, "PYTHONPATH": os.pathsep.join(absolute), "PYTHONSAFEPATH": "1"},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # It has its own session: its end reaches its forks too, and Ctrl-C only reaches this process.
            start_new_session=POSIX,
        )
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(imports) + "\n")
        self.process.stdin.flush()

    def calls(
        self, times: int, function: Callable[..., Value], *arguments: Any, on_line: Callable[[str], None] = print
    ) -> Iterator[Value]:
        """Yields the values of several calls of a module-level function, with the number of threads of this process.

        The arguments are pickled once. `on_line` is called with every line that the function prints; its progress goes
        to stderr.

        Raises:
            NotSupported: An argument cannot be pickled, the function raised an error of attnrx, with its message, or
                the process ended without a result.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        with scratch_folder() as folder:
            try:
                (folder / _CALLED).write_bytes(pickle.dumps((function, arguments, torch.get_num_threads())))
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                raise NotSupported(
                    f"{function.__name__} cannot be called in a new process, because its arguments cannot be pickled "
                    f"({error}). {ADVICE}"
                ) from error
            returned = folder / _RETURNED
            for _ in range(times):
                with suppress(BrokenPipeError):  # the process has ended: there is no answer below
                    self.process.stdin.write(f"{folder}\n")
                    self.process.stdin.flush()
                # stdout has the lines that the function prints, as they come; the result is in a file.
                for line in self.process.stdout:
                    if line.rstrip("\n") == _DONE:
                        break
                    on_line(line.rstrip("\n"))
                if not returned.exists():
                    code = self.process.wait()
                    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
                    raise NotSupported(
                        f"the process that was to run {function.__name__} {how}; see its output above. Free memory, or "
                        "measure in this process (in_subprocess=False)."
                    )
                value, failed = pickle.loads(returned.read_bytes())
                if failed is not None:
                    raise NotSupported(failed)
                returned.unlink()
                yield value

    def close(self) -> None:
        """Ends the process, and the process of a call that it runs."""
        _end_group(self.process)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with suppress(BrokenPipeError):
                stream.close()
        self.process.wait()


_shared: list[Subprocess] = []


@contextmanager
def shared_subprocess() -> Iterator[Subprocess]:
    """Runs all calls of `run_in_subprocess` within the context in one process, which starts now."""
    if _shared:
        yield _shared[-1]
        return
    _shared.append(Subprocess())
    try:
        yield _shared[-1]
    finally:
        _shared.pop().close()


def run_in_subprocess(
    function: Callable[..., Value], *arguments: Any, in_subprocess: bool = True, on_line: Callable[[str], None] = print
) -> Value:
    """Calls a module-level function in another process, as `Subprocess.calls` does, and returns its value.

    With `in_subprocess=False` it is called in this process.
    """
    if not in_subprocess:
        return function(*arguments)
    with shared_subprocess() as process:
        (value,) = process.calls(1, function, *arguments, on_line=on_line)
        return value


def run_side_by_side(calls: Sequence[Callable[[], Value]], in_subprocess: bool = True) -> list[Value]:
    """Makes independent calls, every second one in another process, and returns their values in order.

    Calls that another process cannot make are made in this one, and so are all calls with `in_subprocess=False`.
    """
    there = list(calls[1::2]) if in_subprocess else []
    values = dict[int, Value]()

    def call_there() -> None:
        # An error is raised again by the same call in this process, or it was an error of the other process.
        with suppress(NotSupported):
            found: list[Any] = run_in_subprocess(_called, there)
            values.update({2 * index + 1: value for index, value in enumerate(found)})

    # A daemon ends with its process, which an interrupted call ends.
    worker = threading.Thread(target=call_there, daemon=True)
    if there:
        worker.start()
    values |= {index: call() for index, call in enumerate(calls) if not there or index % 2 == 0}
    if there:
        worker.join()
    return [values[index] if index in values else call() for index, call in enumerate(calls)]


def _called(calls: Sequence[Callable[[], Value]]) -> list[Value]:
    return [call() for call in calls]


def serve() -> None:
    """Runs in the new process: reads names of modules and the folders of calls from stdin.

    The result of each call is written to its folder.
    """
    _end_with_parent()
    for name in sys.stdin.readline().split():
        with suppress(ImportError):
            __import__(name)
    for line in sys.stdin:
        folder = Path(line.rstrip("\n"))
        if FORKS:
            child = os.fork()
            if not child:
                _end_with_parent()
                _run_and_exit(folder)
            _, status = os.waitpid(child, 0)
            # The caller reports this end: it reads no result, and waits for this process.
            if os.WIFSIGNALED(status):
                os.kill(os.getpid(), os.WTERMSIG(status))
            if status:
                sys.exit(os.waitstatus_to_exitcode(status))
        else:
            _run(folder)
        sys.stdout.write(f"{_DONE}\n")
        sys.stdout.flush()


def _end_with_parent() -> None:
    """Lets Linux end this process when its parent has ended.

    Its standard input ends then too, but a process that runs a call does not read it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _run(folder: Path) -> None:
    """Runs the call in a folder, and writes its result there."""
    try:
        function, arguments, threads = pickle.loads((folder / _CALLED).read_bytes())
    except (AttributeError, ImportError) as error:
        returned = None, f"a new process does not find a class or a function of the model ({error}). {ADVICE}"
    else:
        torch.set_num_threads(threads)
        try:
            returned = function(*arguments), None
        # Returned as text, because an exception whose class takes more than a message cannot be unpickled. Other
        # exceptions end the process.
        except AttnrxError as error:
            returned = None, str(error)
    (folder / _RETURNED).write_bytes(pickle.dumps(returned))


def _run_and_exit(folder: Path) -> None:
    """Runs a call and ends this process without the clean-up that belongs to its parent."""
    code = 1
    try:
        _run(folder)
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


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
    # Compilers get a folder for their temporary files, which they leave there if they are ended.
    with scratch_folder() as scratch:
        # In the root folder, because compilers read empty entries of CPATH and its like as the current folder.
        process = subprocess.Popen(
            command,
            env={**os.environ, "PATH": _program_path(), "TMPDIR": str(scratch)},
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=POSIX,
        )
        with process:
            try:
                out, err = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired as error:
                _end_group(process)
                raise TimeoutError(f"{command[0]} timed out after {timeout} seconds") from error
            except BaseException:  # Ctrl-C ends the program, and the programs that it started
                _end_group(process)
                raise
        return subprocess.CompletedProcess(command, process.returncode, out, err)


def _end_group(process: "subprocess.Popen[str]") -> None:
    """Ends a process that has its own session, and the processes that it started."""
    if POSIX:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
    else:
        process.terminate()


def _program_path() -> str:
    entries = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return os.pathsep.join(entry for entry in entries if Path(entry).is_absolute())
