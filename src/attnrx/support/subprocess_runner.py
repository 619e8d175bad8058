"""Runs programs, and calls functions in other processes. No other module of attnrx starts child processes.

Models are timed in a separate process, because the state of the calling process, e.g. its heap, would affect the times.
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
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle
import torch

from attnrx.support.atomic_writes import scratch_folder
from attnrx.support.errors import AttnrxError, NotSupported

Value = TypeVar("Value")

ROOT = Path(os.sep).absolute()
POSIX = os.name == "posix"
VARIABLES = {
    # By default, glibc returns large free blocks to the operating system. When it needs the memory again, every page
    # causes a page fault. Page faults are not a cost of the model, and their time varied by 10 % within 15 minutes.
    # Systems without glibc ignore these two variables.
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    # Some libraries look for CUDA devices while they are imported. They must not initialize CUDA, because then forks of
    # the process could not use it.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
# If this process has loaded one of these libraries, the new process imports it at its start. Pickled models need them.
LIBRARIES = ("timm", "transformers", "attnrx", "attnrx_lab")

# On Linux, every call runs in its own fork with a fresh heap. In a process that had measured a cost table before, a
# model was 15 % slower than in a new process. The forks are cheap, because their parent has already imported
# everything. They are safe, because it has not started any threads.
FORKS = sys.platform == "linux"
_PR_SET_PDEATHSIG = 1  # the option of Linux's prctl for a signal at the death of the parent

ADVICE = "Measure in this process (in_subprocess=False), or define the classes and functions of the model in a module."

# The names of a call's two files, and the line that ends its output. No line of text starts with a zero byte.
_CALLED, _RETURNED, _DONE = "called", "returned", "\0done"


class _Fork:
    """Records whether this process is a fork of a process that had not started any threads (see `serve`)."""

    is_served = False


def is_served_fork() -> bool:
    """Returns whether this process is a fork of a process that had not started any threads.

    Only such a fork may run OpenMP code on several threads. OpenMP threads do not survive a fork, so code that needs
    them would wait forever if the parent had started any.
    """
    return _Fork.is_served


class Subprocess:
    """A separate Python process that runs function calls. On Linux, every call runs in its own fork of that process.

    The separate process keeps freed memory instead of returning it to the operating system, as a service with its own
    allocator does. Functions, arguments and results are pickled with cloudpickle, which also supports classes and
    functions of a script or a notebook. The pickles are exchanged in a private temporary folder. The separate process
    ends when the calling process ends, even after a crash. On systems other than Linux, it finishes its current call
    first. It imports modules from the same folders as the calling process, but searches relative folders last.
    """

    def __init__(self):
        imports = [name for name in sys.modules if name.partition(".")[0] in LIBRARIES]
        absolute = [entry for entry in sys.path if Path(entry).is_absolute()]
        relative = [str(Path(entry).absolute()) for entry in sys.path if entry not in absolute]
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", f"import sys; sys.path += {relative}; from {__name__} import serve; serve()"],
            # Processes that libraries start there, e.g. torch's compiler, also use these Python variables.
            env={**os.environ, **VARIABLES, "PYTHONPATH": os.pathsep.join(absolute), "PYTHONSAFEPATH": "1"},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # The process has its own session. So its forks can be ended together with it, and Ctrl-C does not reach it.
            start_new_session=POSIX,
        )
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(imports) + "\n")
        self.process.stdin.flush()

    def calls(
        self, times: int, function: Callable[..., Value], *arguments: Any, on_line: Callable[[str], None] = print
    ) -> Iterator[Value]:
        """Calls a module-level function several times with the same arguments, and yields the return values.

        The arguments are pickled once. PyTorch uses the same number of threads as in the calling process. `on_line` is
        called with every line that the function prints to stdout. The function's stderr is not captured.

        Raises:
            NotSupported: An argument cannot be pickled, or the process ended without a result. Also raised, with the
                same message, if the function raised an attnrx error.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        with scratch_folder() as folder:
            try:
                (folder / _CALLED).write_bytes(cloudpickle.dumps((function, arguments, torch.get_num_threads())))
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                raise NotSupported(
                    f"{function.__name__} cannot be called in a new process, because its arguments cannot be pickled "
                    f"({error}). {ADVICE}"
                ) from error
            returned = folder / _RETURNED
            for _ in range(times):
                with suppress(BrokenPipeError):  # if the process has ended, the missing result is reported below
                    self.process.stdin.write(f"{folder}\n")
                    self.process.stdin.flush()
                # The other process writes its printed lines to stdout, and its result to a file.
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
        """Ends the other process and, if a call is running, the fork that runs the call."""
        _end_group(self.process)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with suppress(BrokenPipeError):
                stream.close()
        self.process.wait()


_shared: list[Subprocess] = []


@contextmanager
def shared_subprocess() -> Iterator[Subprocess]:
    """Starts a process that runs all calls of `run_in_subprocess` within the context."""
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
    """Calls a module-level function in another process (see `Subprocess.calls`), and returns its value.

    With `in_subprocess=False`, the function is called in this process.
    """
    if not in_subprocess:
        return function(*arguments)
    with shared_subprocess() as process:
        (value,) = process.calls(1, function, *arguments, on_line=on_line)
        return value


def run_side_by_side(calls: Sequence[Callable[[], Value]], in_subprocess: bool = True) -> list[Value]:
    """Runs independent calls in this process and another one at the same time, and returns their values in order.

    As soon as a process has finished a call, it takes the next one. If the other process cannot run a call, this
    process runs it. Each process uses half of PyTorch's threads. With `in_subprocess=False`, this process runs all
    calls.
    """
    waiting, values = deque(range(len(calls))), dict[int, Value]()

    def run_waiting(run: Callable[[Callable[[], Any]], Any]) -> None:
        while True:
            try:
                index = waiting.popleft()
            except IndexError:
                return
            values[index] = run(calls[index])

    def run_there() -> None:
        # If the other process fails, the call runs again in this process below. A call that cannot succeed then raises
        # its own error.
        with suppress(NotSupported), shared_subprocess():
            run_waiting(lambda call: run_in_subprocess(_called, call))

    # The thread is a daemon, so that it does not keep this process running if a call is interrupted.
    worker, threads = threading.Thread(target=run_there, daemon=True), torch.get_num_threads()
    if in_subprocess and len(calls) > 1:
        # With more threads than processors, every operation would wait for a thread that is not running.
        torch.set_num_threads(max(threads // 2, 1))
        worker.start()
    try:
        run_waiting(lambda call: call())
    finally:
        waiting.clear()  # if a call has failed, the other process takes no further ones
        torch.set_num_threads(threads)
    if worker.ident is not None:
        worker.join()
    return [values[index] if index in values else call() for index, call in enumerate(calls)]


def _called(call: Callable[[], Value]) -> Value:
    return call()


def serve() -> None:
    """Runs function calls in the separate process.

    The first line of stdin names the modules to import. Each further line is the path of a folder that contains the
    pickled function and arguments of one call. The result is written to the same folder.
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
                _Fork.is_served = True
                _end_with_parent()
                _run_and_exit(folder)
            _, status = os.waitpid(child, 0)
            # If the fork was killed or failed, this process ends in the same way. The caller then finds no result, and
            # reports how the process ended.
            if os.WIFSIGNALED(status):
                os.kill(os.getpid(), os.WTERMSIG(status))
            if status:
                sys.exit(os.waitstatus_to_exitcode(status))
        else:
            _run(folder)
        sys.stdout.write(f"{_DONE}\n")
        sys.stdout.flush()


def _end_with_parent() -> None:
    """Asks Linux to end this process when its parent ends.

    Waiting for the end of stdin would not be enough, because a process does not read stdin while it runs a call.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _run(folder: Path) -> None:
    """Runs the call that is stored in a folder, and writes its result to the same folder."""
    try:
        function, arguments, threads = pickle.loads((folder / _CALLED).read_bytes())
    except (AttributeError, ImportError) as error:
        returned = None, f"a new process does not find a class or a function of the model ({error}). {ADVICE}"
    else:
        torch.set_num_threads(threads)
        try:
            returned = function(*arguments), None
        # An error of attnrx is returned as text, because an exception with more arguments than a message cannot be
        # unpickled. Any other exception ends the process.
        except AttnrxError as error:
            returned = None, str(error)
    (folder / _RETURNED).write_bytes(cloudpickle.dumps(returned))


def _run_and_exit(folder: Path) -> None:
    """Runs a call in a fork, and ends the fork without Python's exit handlers, which only the parent should run."""
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
    """Returns the absolute path of a program, or None if it is not found. Relative entries in PATH are skipped.

    If the name contains a separator, e.g. `./compiler`, it is a path relative to the current folder.
    """
    found = shutil.which(name, path=_program_path())
    return None if found is None else str(Path(found).absolute())


def run_program(command: Sequence[str], timeout: int | float) -> subprocess.CompletedProcess[str]:
    """Runs a program in the root folder `/`, and returns its exit code and its output.

    Raises:
        OSError: The program cannot be started, or has not ended after `timeout` seconds.
    """
    # Compilers leave temporary files behind if they are killed, so they get a temporary folder that is deleted.
    with scratch_folder() as scratch:
        # The program runs in the root folder, because compilers treat an empty entry in CPATH as the current folder.
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
            except BaseException:  # e.g. after Ctrl-C, the program must end together with the programs that it started
                _end_group(process)
                raise
        return subprocess.CompletedProcess(command, process.returncode, out, err)


def _end_group(process: "subprocess.Popen[str]") -> None:
    """Ends a process that has its own session, together with the processes that it started."""
    if POSIX:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
    else:
        process.terminate()


def _program_path() -> str:
    entries = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return os.pathsep.join(entry for entry in entries if Path(entry).is_absolute())
