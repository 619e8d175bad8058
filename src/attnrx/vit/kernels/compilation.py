"""Loads or compiles the C++ kernels, and registers them as PyTorch operators.

Because the kernels are operators, they work with profilers, FLOP counters and meta tensors. A wheel contains the
compiled library. Without a wheel, the user's compiler builds the library on first use, in a private cache folder.

Before attnrx loads a library from the cache, it checks that nobody else could have replaced it. The folder and the
library must belong to this user. They must not be symbolic links, and other users must not have write permission. The
name of the library contains the hash of the built file. attnrx compares this hash with the content of the opened file,
and loads the library from the same file descriptor. A library in a wheel is trusted like any Python module.
"""

import ctypes
import os
import shlex
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from attnrx.support.atomic_writes import scratch_folder
from attnrx.support.errors import AttnrxError, CheckpointError, InvalidInput, KernelWarning, NotSupported
from attnrx.support.hardware import cache_folder
from attnrx.support.shapes import Float, Tensor
from attnrx.support.subprocess_runner import find_program, is_served_fork, run_program
from attnrx.vit.kernels.flags import FLAGS, HEADERS, SOURCES, THREADS, shipped_library

BUILD = "ATTNRX_BUILD"
COMPILERS = ("c++", "g++", "clang++")
NATIVE = ("-march=native", "-shared")
PATIENCE = 120
"""The timeout of a compiler call in seconds. A call usually takes three to six seconds."""
OTHERS_CAN_WRITE = 0o022  # group and all others
DESCRIPTORS = Path("/proc/self/fd")
# The argument types of every C function: p is a pointer, i an int, l a 64-bit integer, f a float.
ARGUMENTS = {
    "attention": "piiiipfipp",
    "mixed_attention": "pippiiiipi",
    "joint_attention": "ppippiipfipp",
    "merge": "pi",
    "maps": "piipllpi",
    "block": "pi",
}
_OPERATORS = torch.library.Library("attnrx", "FRAGMENT")
_BUILDING = Lock()  # a thread that needs the library waits until another thread has built it


# The result is cached even if the build fails, because a failing compiler must not run again in every layer.
@lru_cache(maxsize=1)
def native_library() -> ctypes.CDLL | None:
    """Loads the library of C++ kernels, or returns None if PyTorch's kernels must run instead.

    The library is loaded from the wheel if the wheel contains one for this processor. Otherwise it is loaded from the
    cache, or compiled. The result is None if ATTNRX_BUILD is 0, or if no compiler is found ($CXX, or c++, g++ or
    clang++ on the path). If the compiler fails, or if other users can write to the cache folder, the function returns
    None and issues a `KernelWarning`.
    """
    # The owner of a file can only be checked on POSIX systems.
    if os.environ.get(BUILD, "1") == "0" or os.name != "posix":
        return None
    for name in (torch.backends.cpu.get_cpu_capability().lower(), "default"):
        with suppress(OSError):  # no such library, or it needs a different OpenMP library than PyTorch loaded
            return _declared(ctypes.CDLL(str(shipped_library(name))))
    try:
        if not (compiler := cpp_compiler()):
            return None
        with suppress(_CompilerFailed):  # a compiler without OpenMP builds the single-threaded library below
            return _built_by([*compiler, *FLAGS, *NATIVE, THREADS])
        return _built_by([*compiler, *FLAGS, *NATIVE])
    except (OSError, AttnrxError) as error:
        warnings.warn(
            f"PyTorch's attention runs in place of the C++ kernel: {str(error).strip()} Set {BUILD}=0 to silence this.",
            KernelWarning,
            stacklevel=2,
        )
        return None


def required_library() -> ctypes.CDLL:
    """Returns the library of C++ kernels.

    Raises:
        NotSupported: No wheel contains the library, and it cannot be built on this machine.
    """
    library = native_library()
    if library is None:
        raise NotSupported(
            "the kernels of the backend 'native' are in wheels for Linux, or built by a C++ compiler ($CXX, or c++, "
            "g++ or clang++ on the path); here are neither, and 'auto' runs without."
        )
    return library


class _Threads:
    """Records whether this process was forked, and whether it or its parent ran a kernel on several threads."""

    is_forked = False
    were_used = False


def kernel_threads() -> int:
    """Returns how many threads a kernel uses: PyTorch's setting, or 1 in a forked process that must not use threads."""
    threads = 1 if _Threads.is_forked and not is_served_fork() else torch.get_num_threads()
    _Threads.were_used |= threads > 1
    return threads


def _start_forked() -> None:
    _Threads.is_forked = True
    # PyTorch's operations use the same OpenMP threads, so they are limited to one thread, too. If no kernel used
    # threads before the fork, PyTorch's setting is kept.
    if _Threads.were_used:
        torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_start_forked)


def kernel_version() -> str:
    """Returns a hash of the kernels' source code, or "" if the kernels are not available."""
    return _sha256(_source()) if native_library() is not None else ""


def _source() -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in (*HEADERS, *SOURCES))


def cpp_compiler() -> list[str]:
    """Returns the C++ compiler's command as a list of words, or [] if no compiler is found.

    Raises:
        InvalidInput: The environment variable CXX is set, but does not name a program on the path.
    """
    variable = os.environ.get("CXX", "").strip()
    if not variable:
        return next(([path] for name in COMPILERS if (path := find_program(name)) is not None), [])
    try:
        words = shlex.split(variable)  # there may be several words, e.g. a wrapper and its compiler
    except ValueError as error:
        raise InvalidInput(f"CXX={variable!r} is no command ({error}); set CXX to a C++ compiler.") from error
    path = find_program(words[0])
    if path is None:
        raise InvalidInput(f"CXX={variable!r} names no program on the path; set CXX to a C++ compiler.")
    return [path, *words[1:]]


def _built_by(command: list[str]) -> ctypes.CDLL:
    """Loads the library for this source code, compiler and machine from the cache, or builds it.

    Raises:
        CheckpointError: The cache folder is not private, or the new library cannot be loaded.
    """
    # Different machines may share a cache folder. The compiler's predefined macros contain its version and the
    # instructions that -march=native enables, so their hash identifies the machine.
    defined = output_of([*command, "-dM", "-E", "-x", "c++", os.devnull])
    key = _sha256("\n".join((_source(), *command, defined)))[:16]
    folder = cache_folder() / "kernels"
    _create_private(folder)
    with _BUILDING:
        return _cached_or_built(command, folder, key)


def _cached_or_built(command: list[str], folder: Path, key: str) -> ctypes.CDLL:
    for path in sorted(folder.glob(f"native-{key}-*.so")):
        with suppress(OSError, CheckpointError, AttributeError):  # AttributeError: the library lacks a function
            return _loaded(path)
    # The library is built in a scratch folder inside the cache. A rename then gives the finished file a name that
    # contains its hash. If a link with this name exists, a rename replaces the link and does not follow it.
    with scratch_folder(folder) as temporary:
        library = temporary / "library.so"
        objects = [str(temporary / f"{source.stem}.o") for source in SOURCES]
        commands = [[*command, "-c", str(source), "-o", path] for source, path in zip(SOURCES, objects, strict=True)]
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # one after the other, the sources took 18 s
            list(pool.map(output_of, commands))
        output_of([*command, *objects, "-o", str(library)])
        library.chmod(0o600)
        path = library.replace(folder / f"native-{key}-{sha256(library.read_bytes()).hexdigest()}.so")
    try:
        return _loaded(path)
    except (OSError, AttributeError) as error:
        raise CheckpointError(f"{path.name} in {folder} was just built and cannot be loaded ({error}).") from error


def _sha256(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def output_of(command: list[str]) -> str:
    """Runs a compiler command and returns its standard output.

    Raises:
        NotSupported: The compiler returned an error.
    """
    result = run_program(command, PATIENCE)
    if result.returncode:
        reason = result.stderr.strip()[-300:] or f"exit code {result.returncode}"
        raise _CompilerFailed(
            f"the kernel could not be built with {shlex.join(command)} ({reason}); set CXX to another compiler."
        )
    return result.stdout


class _CompilerFailed(NotSupported):
    """Raised if a compiler returns an error."""


def _create_private(folder: Path) -> None:
    folder.parent.parent.mkdir(parents=True, exist_ok=True)
    for directory in (folder.parent, folder):
        if not directory.is_symlink():
            directory.mkdir(mode=0o700, exist_ok=True)
    os.close(_open_private(folder, os.O_DIRECTORY))


def _open_private(path: Path, flags: int = 0, within: int | None = None) -> int:
    """Opens a file or folder, checks its owner and permissions, and returns the file descriptor."""
    if path.is_symlink():
        raise CheckpointError(f"{path} is a symbolic link, which could lead to files of others. Remove it.")
    name = path if within is None else path.name
    # O_NOFOLLOW refuses a link that replaced the file after the check. O_NONBLOCK does not wait for a named pipe.
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | flags, dir_fd=within)
    # fstat checks the opened file. Checking the path would be unsafe, because it may now lead to another file.
    status, user = os.fstat(descriptor), os.geteuid()
    if status.st_uid == user and not status.st_mode & OTHERS_CAN_WRITE:
        return descriptor
    os.close(descriptor)
    if status.st_uid != user:
        raise CheckpointError(
            f"{path} belongs to user {status.st_uid}, not to {user}. Set ATTNRX_CACHE to a folder of your own."
        )
    raise CheckpointError(
        f"{path} can be written by others (mode {status.st_mode & 0o777:o}). Run chmod 700 {path}, or set ATTNRX_CACHE "
        "to a folder of your own."
    )


def _loaded(path: Path) -> ctypes.CDLL:
    # The file is opened relative to the checked folder, because the path may now lead to another folder.
    within = _open_private(path.parent, os.O_DIRECTORY)
    try:
        descriptor = _open_private(path, within=within)
    finally:
        os.close(within)
    with os.fdopen(descriptor, "rb", closefd=False) as handle:
        digest = sha256(handle.read()).hexdigest()
    if digest != path.stem.rpartition("-")[2]:
        os.close(descriptor)
        raise CheckpointError(f"{path} is not the library that was built (its sha256 differs).")
    # The descriptor's path always leads to the checked file, even if the original path was replaced. The descriptor
    # stays open. Otherwise the next file could get its number, and the loader, which identifies libraries by name,
    # would mistake that file for this library.
    opened = DESCRIPTORS / str(descriptor)
    return _declared(ctypes.CDLL(str(opened if opened.exists() else path)))


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    # Without argument types, ctypes would pass addresses as 32-bit integers.
    types = {"p": ctypes.c_void_p, "i": ctypes.c_int, "l": ctypes.c_int64, "f": ctypes.c_float}
    for name, arguments in ARGUMENTS.items():
        function = getattr(library, f"attnrx_{name}")
        function.argtypes, function.restype = [types[each] for each in arguments], ctypes.c_int
    return library


def define(
    schema: str, kernel: Callable[..., Any], empty: Callable[..., Any], operations: Callable[..., int]
) -> Callable[..., Any]:
    """Registers a kernel as a PyTorch operator for inference (without autograd), and returns the operator.

    Args:
        schema: The operator's signature in PyTorch's schema language.
        kernel: A function that computes the operator on a CPU.
        empty: A function that returns uninitialized outputs of the right shapes, for meta tensors and for compilers.
        operations: A function that returns the number of floating-point operations for given shapes. One MAC counts as
            two operations.
    """
    _OPERATORS.define(schema)
    name = schema.partition("(")[0]
    _OPERATORS.impl(name, kernel, "CPU")
    _OPERATORS.impl(name, empty, "Meta")
    operator = getattr(torch.ops.attnrx, name)
    register_flop_formula(operator)(operations)
    return operator.default


def is_observed(tensor: Float[Tensor, "*sizes"]) -> bool:
    """Whether operators must run through PyTorch's dispatcher, e.g. for a profiler, a mode or a tensor subclass.

    If this function returns False, a kernel may be called directly, which saves time.
    """
    return (
        type(tensor) is not Tensor
        or not tensor.is_cpu
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore[reportAttributeAccessIssue]
        or torch.autograd._profiler_enabled()
    )


def require_inference(tensors: Sequence[Tensor | None]) -> None:
    """Checks that kernels can process these tensors (of any shape).

    Raises:
        InvalidInput: A tensor requires gradients, which the kernels do not compute, or its layout is not strided.
    """
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.requires_grad and torch.is_grad_enabled():
            raise InvalidInput("a C++ kernel records no gradients, and one of its inputs requires them: use no_grad().")
        if tensor.layout != torch.strided:
            raise InvalidInput(f"a C++ kernel reads dense tensors; {tensor.layout} given: convert it by to_dense().")


def require_fitting(fits: bool, *tensors: Tensor | None) -> None:
    """Raises InvalidInput if `fits` is false, with the dtypes and shapes of the tensors in the message.

    `fits` is the caller's verdict on dtypes and shapes. With wrong ones, a kernel would access memory outside the
    tensors.
    """
    if not fits:
        given = ", ".join(f"{each.dtype} {list(each.shape)}" for each in tensors if each is not None)
        raise InvalidInput(f"a C++ kernel cannot read {given}: give float32 tensors on a CPU whose shapes fit.")


def address(tensor: Float[Tensor, "*sizes"] | None) -> int | None:
    """Returns the memory address of a contiguous tensor, or None if `tensor` is None."""
    return None if tensor is None else tensor.data_ptr()
