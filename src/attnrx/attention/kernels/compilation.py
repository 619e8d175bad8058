"""The C++ kernels: built with the user's compiler on first use and stored in the cache folder."""

import ctypes
import os
import re
import shlex
import shutil
import subprocess
import warnings
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path

from attnrx.attention.kernels.library_cache import LibraryRecipe, load_or_build
from attnrx.errors import AttnrxError, InvalidInput, KernelWarning, NotSupported
from attnrx.runtime.hardware import cache_folder

BUILD = "ATTNRX_BUILD"
SOURCE = Path(__file__).with_name("native.cpp")
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-shared", "-w")
THREADS = "-fopenmp"
PATIENCE = 120
"""Seconds that a compiler may take; it takes about three."""


@lru_cache(maxsize=1)
def native_library() -> ctypes.CDLL | None:
    """Returns the library of the kernels; builds it if no earlier process did.

    None if ATTNRX_BUILD is 0 or there is no compiler ($CXX, or c++, g++ or clang++ on the path); None with a
    `KernelWarning` if the compiler fails or other users can write to the cache folder. PyTorch's slower kernels run in
    their place.
    """
    if (
        os.environ.get(BUILD, "1") == "0" or os.name != "posix"
    ):  # on other systems the owner of a file cannot be checked
        return None
    try:
        compiler = _compiler()
        return _built(compiler) if compiler else None
    except (OSError, AttnrxError, subprocess.SubprocessError) as error:
        warnings.warn(
            f"PyTorch's attention runs in place of the C++ kernel: {str(error).strip()} Set {BUILD}=0 to silence this.",
            KernelWarning,
            stacklevel=2,
        )
        return None


def required_library() -> ctypes.CDLL:
    """Returns the library of the kernels.

    Raises:
        NotSupported: It cannot be built here.
    """
    library = native_library()
    if library is None:
        raise NotSupported(
            "the backend 'native' is built by a C++ compiler ($CXX, or c++, g++ or clang++ on the path), and none has "
            "built it here; 'auto' runs without."
        )
    return library


def _compiler() -> list[str]:
    """Returns the command of the compiler, empty if there is none."""
    named = os.environ.get("CXX", "").strip()
    if not named:
        return next(([name] for name in COMPILERS if shutil.which(name)), [])
    try:
        words = shlex.split(named)
    except ValueError as error:
        raise InvalidInput(f"CXX={named!r} is no command ({error}); set CXX to a C++ compiler.") from error
    if not shutil.which(words[0]):
        raise InvalidInput(f"CXX={named!r} names no program on the path; set CXX to a C++ compiler.")
    return words


def _built(compiler: list[str]) -> ctypes.CDLL:
    try:
        return _built_by([*compiler, *FLAGS, THREADS])
    except _CompilerFailed:  # without OpenMP there is one thread
        return _built_by([*compiler, *FLAGS])


def _built_by(command: list[str]) -> ctypes.CDLL:
    """Loads the library of this source, compiler and machine."""
    # The compiler's predefined macros contain its version and the instructions of -march=native: a cache folder may
    # be shared by machines with equal names.
    defined = _output_of([*command, "-dM", "-E", "-x", "c++", os.devnull])
    source = SOURCE.read_text(encoding="utf-8")
    key = _sha256("\n".join((source, *command, defined)))[:16]
    version = re.search(r'^#define __VERSION__ "(.*)"', defined, re.MULTILINE)
    about = {"source_sha256": _sha256(source), "command": command, "compiler": version and version.group(1)}
    return load_or_build(
        cache_folder() / "kernels", LibraryRecipe(f"native-{key}", partial(_build, command), _declared, about)
    )


def _sha256(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def _build(command: list[str], path: Path) -> None:
    _output_of([*command, str(SOURCE), "-o", str(path)])


def _output_of(command: list[str]) -> str:
    run = partial(subprocess.run, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", errors="replace")
    done = run(command, timeout=PATIENCE)
    if done.returncode:
        reason = done.stderr.strip()[-300:] or f"exit code {done.returncode}"
        raise _CompilerFailed(
            f"the kernel could not be built with {shlex.join(command)} ({reason}); set CXX to another compiler."
        )
    return done.stdout


class _CompilerFailed(NotSupported):
    """The compiler returned an error."""


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    whole, pointer = ctypes.c_int, ctypes.c_void_p
    library.attnrx_attention.argtypes = [pointer, whole, whole, whole, whole, pointer, ctypes.c_float, whole]
    library.attnrx_attention.restype = whole
    return library
