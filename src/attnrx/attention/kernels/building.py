"""The kernels in C++: built by the user's own compiler when first used, and kept in the cache folder."""

import ctypes
import os
import shlex
import shutil
import subprocess
import warnings
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

from attnrx.errors import AttnrxError, NotSupported
from attnrx.hardware import cache_folder
from attnrx.storage import write_atomically

BUILD = "ATTNRX_BUILD"
SOURCE = Path(__file__).with_name("native.cpp")
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-shared", "-w")
THREADS = "-fopenmp"
PATIENCE = 120
"""Seconds that a compiler may take; it takes about three."""


@lru_cache(maxsize=1)
def native_library() -> ctypes.CDLL | None:
    """Loads the kernels, after building them where no earlier process did.

    None where ATTNRX_BUILD is 0, where there is no compiler ($CXX, or c++, g++ or clang++ on the path), or where it
    fails, which is said by a warning. Nothing depends on the kernels: PyTorch's own run in their place, slower.
    """
    compiler = _compiler()
    if os.environ.get(BUILD, "1") == "0" or not compiler:
        return None
    try:
        return _declared(ctypes.CDLL(str(_built(compiler))))
    except (OSError, AttnrxError, subprocess.SubprocessError) as error:
        told = getattr(error, "stderr", None) or str(error)
        warnings.warn(
            f"the attention kernel could not be built with {shlex.join(compiler)} ({told.strip()[-300:]}), so that "
            f"PyTorch's runs in its place. Set {BUILD}=0 to silence this, or CXX to another compiler.",
            stacklevel=2,
        )
        return None


def required_library() -> ctypes.CDLL:
    """Gives the kernels where there must be some.

    Raises:
        NotSupported: They could not be built here.
    """
    library = native_library()
    if library is None:
        raise NotSupported(
            "the backend 'native' is built by a C++ compiler ($CXX, or c++, g++ or clang++ on the path), and none has "
            "built it here; 'auto' runs without."
        )
    return library


def _compiler() -> list[str]:
    """Gives the words that call the compiler, none where there is none."""
    named = shlex.split(os.environ.get("CXX", ""))
    for words in [named] if named else [[name] for name in COMPILERS]:
        if shutil.which(words[0]):
            return words
    return []


def _built(compiler: list[str]) -> Path:
    try:
        return _built_by([*compiler, *FLAGS, THREADS])
    except subprocess.CalledProcessError:  # without OpenMP there is one thread
        return _built_by([*compiler, *FLAGS])


def _built_by(command: list[str]) -> Path:
    """Gives the library, built unless one of this source, compiler and machine is there."""
    # What a compiler defines names its version, and the instructions that -march=native stands for: a cache folder may
    # be shared by machines that call themselves the same.
    defined = _output_of([*command, "-dM", "-E", "-x", "c++", os.devnull])
    told = "\n".join((SOURCE.read_text(encoding="utf-8"), *command, defined))
    path = cache_folder() / "kernels" / f"native-{sha256(told.encode()).hexdigest()[:16]}.so"
    if not path.exists():
        write_atomically(path, lambda temporary: _build(command, temporary))
    return path


def _build(command: list[str], path: Path) -> None:
    _output_of([*command, str(SOURCE), "-o", str(path)])


def _output_of(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True).stdout


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    whole, pointer = ctypes.c_int, ctypes.c_void_p
    library.attnrx_attention.argtypes = [pointer, whole, whole, whole, whole, pointer, ctypes.c_float, whole]
    library.attnrx_attention.restype = whole
    return library
