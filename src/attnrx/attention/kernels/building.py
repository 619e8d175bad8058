"""The kernels in C++: built by the user's own compiler when first used, and kept in the cache folder."""

import ctypes
import os
import shutil
import subprocess
import warnings
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

from attnrx.errors import AttnrxError
from attnrx.hardware import cache_folder, device_name
from attnrx.storage import write_atomically

BUILD = "ATTNRX_BUILD"
SOURCE = Path(__file__).with_name("native.cpp")
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-shared", "-w")
# The instructions of this machine, and threads; the second is left out where the compiler has no OpenMP.
WISHES = (("-march=native", "-fopenmp"), ("-march=native",))
PATIENCE = 120
"""Seconds that a compiler may take; it takes about three."""


@lru_cache(maxsize=1)
def native_library() -> ctypes.CDLL | None:
    """Loads the kernels, after building them where no earlier process did.

    None where ATTNRX_BUILD is 0, where there is no compiler ($CXX, or c++, g++ or clang++ on the path), or where it
    fails, which is said by a warning. Nothing depends on the kernels: PyTorch's own run in their place, slower.
    """
    compiler = _compiler()
    if os.environ.get(BUILD, "1") == "0" or compiler is None:
        return None
    try:
        return _declared(ctypes.CDLL(str(_built(compiler))))
    except (OSError, AttnrxError, subprocess.SubprocessError) as error:
        told = getattr(error, "stderr", None) or str(error)
        warnings.warn(
            f"the attention kernel could not be built with {compiler} ({told.strip()[-300:]}), so that PyTorch's runs "
            f"in its place. Set {BUILD}=0 to silence this, or CXX to another compiler.",
            stacklevel=2,
        )
        return None


def _compiler() -> str | None:
    named = os.environ.get("CXX")
    for name in (named,) if named else COMPILERS:
        found = shutil.which(name)
        if found:
            return found
    return None


def _built(compiler: str) -> Path:
    """Gives the library, built unless one of this source, compiler and machine is there."""
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, timeout=PATIENCE, check=True
    ).stdout
    told = "\n".join((SOURCE.read_text(encoding="utf-8"), version, device_name("cpu"), *FLAGS, *map(str, WISHES)))
    path = cache_folder() / "kernels" / f"native-{sha256(told.encode()).hexdigest()[:16]}.so"
    if not path.exists():
        write_atomically(path, lambda temporary: _build(compiler, temporary))
    return path


def _build(compiler: str, path: Path) -> None:
    for last, wishes in enumerate(WISHES, 1 - len(WISHES)):
        command = [compiler, *FLAGS, *wishes, str(SOURCE), "-o", str(path)]
        try:
            subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
            return
        except subprocess.CalledProcessError:
            if not last:
                raise


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    whole, pointer = ctypes.c_int, ctypes.c_void_p
    library.attnrx_attention.argtypes = [pointer, whole, whole, whole, whole, pointer, ctypes.c_float, whole]
    library.attnrx_attention.restype = whole
    return library
