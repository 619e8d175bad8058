"""Compiled libraries in a private folder; a library is loaded only if its hash is the one recorded when it was built.

A library is native code, so its file name proves nothing. The folder, the library and its record must belong to this
user, must not be symbolic links and must not be writable by other users; then the recorded hash can be trusted, and it
is compared with the content of the file descriptor from which the library is loaded.
"""

import ctypes
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory, mkstemp

from attnrx.errors import CheckpointError
from attnrx.serialization.storage import check_schema, json_text

KIND, SCHEMA = "attnrx compiled library", 1
OTHERS_CAN_WRITE = 0o022
DESCRIPTORS = Path("/proc/self/fd")


@dataclass(frozen=True)
class LibraryRecipe:
    """How a library is built into a path, and prepared after loading; `about` is stored in the record."""

    name: str
    build: Callable[[Path], None]
    prepare: Callable[[ctypes.CDLL], ctypes.CDLL]
    about: Mapping[str, object] = field(default_factory=dict)


def load_or_build(folder: Path, recipe: LibraryRecipe) -> ctypes.CDLL:
    """Loads a library from the folder; an absent, damaged or non-private one is rebuilt once.

    Raises:
        CheckpointError: The folder is not private, or the new library cannot be loaded.
    """
    _create_private(folder)
    try:
        return _loaded(folder, recipe)
    except (OSError, CheckpointError, AttributeError):  # AttributeError: a library without the function
        _build_into(folder, recipe)
    try:
        return _loaded(folder, recipe)
    except (OSError, AttributeError) as error:
        raise CheckpointError(f"{recipe.name} in {folder} was just built and cannot be loaded ({error}).") from error


def _create_private(folder: Path) -> None:
    folder.parent.parent.mkdir(parents=True, exist_ok=True)
    for each in (folder.parent, folder):
        if not each.is_symlink():
            each.mkdir(mode=0o700, exist_ok=True)
    os.close(_open_private(folder, os.O_DIRECTORY))


def _open_private(path: Path, flags: int = 0, within: int | None = None) -> int:
    """Opens a file or folder and returns its descriptor, after checking its owner and permissions."""
    if path.is_symlink():
        raise CheckpointError(f"{path} is a symbolic link, which could lead to files of others. Remove it.")
    name = path if within is None else path.name
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | flags, dir_fd=within)
    found, user = os.fstat(descriptor), os.geteuid()
    if found.st_uid == user and not found.st_mode & OTHERS_CAN_WRITE:
        return descriptor
    os.close(descriptor)
    if found.st_uid != user:
        raise CheckpointError(
            f"{path} belongs to user {found.st_uid}, not to {user}. Set ATTNRX_CACHE to a folder of your own."
        )
    raise CheckpointError(
        f"{path} can be written by others (mode {found.st_mode & 0o777:o}). Run chmod 700 {path}, or set ATTNRX_CACHE "
        "to a folder of your own."
    )


def _loaded(folder: Path, recipe: LibraryRecipe) -> ctypes.CDLL:
    within = _open_private(folder, os.O_DIRECTORY)
    try:
        digest = _recorded_sha256(folder / f"{recipe.name}.json", within)
        path = _library_path(folder, recipe, digest)
        descriptor = _open_private(path, within=within)
    finally:
        os.close(within)
    if sha256(_content(descriptor)).hexdigest() != digest:
        os.close(descriptor)
        raise CheckpointError(f"{path} is not the library that was built (its sha256 differs).")
    # Loads the checked file, even if its path was replaced since. It stays open, because the loader identifies
    # libraries by name: the next file with this descriptor would be taken for this one.
    opened = DESCRIPTORS / str(descriptor)
    return recipe.prepare(ctypes.CDLL(str(opened if opened.exists() else path)))


def _recorded_sha256(path: Path, within: int) -> str:
    descriptor = _open_private(path, within=within)
    try:
        record = json.loads(_content(descriptor))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not readable JSON ({type(error).__name__}).") from error
    finally:
        os.close(descriptor)
    check_schema(record, KIND, SCHEMA, path)
    if not isinstance(record.get("sha256"), str) or not re.fullmatch("[0-9a-f]{64}", record["sha256"]):
        raise CheckpointError(f"{path} holds no sha256 of a library.")
    return record["sha256"]


def _content(descriptor: int) -> bytes:
    with os.fdopen(descriptor, "rb", closefd=False) as handle:
        return handle.read()


def _library_path(folder: Path, recipe: LibraryRecipe, digest: str) -> Path:
    """Returns a path with the hash of the library, so that concurrent builds use different files."""
    return folder / f"{recipe.name}-{digest[:16]}.so"


def _build_into(folder: Path, recipe: LibraryRecipe) -> None:
    """Writes the library, then the record that makes it valid."""
    with TemporaryDirectory() as place:
        built = Path(place) / "library.so"
        recipe.build(built)
        content = built.read_bytes()
    digest = sha256(content).hexdigest()
    _write_private(_library_path(folder, recipe, digest), content)
    record = {"kind": KIND, "schema": SCHEMA, "sha256": digest, **recipe.about}
    _write_private(folder / f"{recipe.name}.json", json_text(record).encode())


def _write_private(path: Path, content: bytes) -> None:
    """Replaces a file by one with owner-only permissions; a link is replaced, not followed."""
    descriptor, temporary = mkstemp(prefix=".", suffix=".partial", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as handle:
            handle.write(content)
            handle.flush()
            os.fsync(handle.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
