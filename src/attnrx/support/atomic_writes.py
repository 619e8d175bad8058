"""Atomic replacement of files and folders.

New content is first written to a temporary file or folder beside the target. It is flushed to disk, and then moved to
the target by one rename. Even if the process is killed, the target has either its previous content or the new content.
The next write to the same target deletes temporary files and folders of killed processes.
"""

import ctypes
import errno
import hashlib
import os
import platform
import re
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, cast

from filelock import FileLock, Timeout  # a dependency of torch

from attnrx.support.errors import CheckpointError, InvalidInput

# Only temporary files of this host are deleted. If another machine shares the disk, its process ids mean nothing here.
_HOST = hashlib.sha256(platform.node().encode()).hexdigest()[:6]
_AT_FDCWD, _SWAP = -100, 2  # RENAME_EXCHANGE of Linux and RENAME_SWAP of macOS have the same value
_SYNCHRONIZE, _ACCESS_DENIED = 0x00100000, 5  # constants of the Windows interface
# The seconds to wait while another process replaces the same folder. A replacement takes less than a second.
LOCK_SECONDS = 60.0
# The error codes of a file system (NFS, FAT) or a kernel that cannot exchange two names.
_NO_SWAP = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)


def write_atomically(path: Path | str, write: Callable[[Path], object]) -> Path:
    """Calls `write` with the path of a temporary file beside `path`, renames this file to `path`, and returns `path`.

    After a crash, a full disk or Ctrl-C, `path` is either the old file or the new file, and never a partial one.
    Symbolic links are followed, and the old file's permissions are kept.

    Args:
        path: The file to write or replace.
        write: A function that writes the content to the path that it is called with.

    Raises:
        InvalidInput: `path` exists and is not a regular file.
        CheckpointError: The file cannot be written.
    """
    path = Path(path)
    require_replaceable(path)
    target = _prepare_target(path)
    temporary = temporary_path(target)
    try:
        write(temporary)
        # The temporary file gets the permissions of the old file, which the rename would otherwise change.
        if target.exists():
            temporary.chmod(stat.S_IMODE(target.stat().st_mode))
        # The content is flushed before the rename. Otherwise a power failure could leave a renamed file without
        # content.
        flush(temporary)
        temporary.replace(target)
        flush(target.parent)
    except OSError as error:
        raise CheckpointError(
            f"cannot write {path}: {error.strerror or error}. "
            "Nothing was changed; free some space or choose another place."
        ) from error
    finally:
        with suppress(OSError):
            temporary.unlink()
    return path


def require_replaceable(path: Path | str) -> None:
    """Raises InvalidInput if something other than a regular file is at the path, because a write would delete it.

    Raises CheckpointError if symbolic links form a loop.
    """
    path = Path(path)
    real_path(path)
    if path.exists() and not path.is_file():
        problem = "a folder; name a file in it" if path.is_dir() else "not a regular file; name one"
        raise InvalidInput(f"{path} cannot be written: it is {problem}.")


@contextmanager
def temporary_folder(target: Path) -> Iterator[Path]:
    """Yields a temporary folder beside `target`, which is deleted at the end of the context.

    Raises:
        InvalidInput: The target is the root of the file system.
        CheckpointError: The folder cannot be created.
    """
    target = _prepare_target(target)
    temporary = temporary_path(target)
    try:
        temporary.mkdir()
    except OSError as error:
        raise CheckpointError(f"cannot write to the folder of {target}: {error.strerror or error}.") from error
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def scratch_folder(folder: Path | None = None) -> Iterator[Path]:
    """Yields an empty private folder, which is deleted at the end or, if this process is killed, by the next call.

    Args:
        folder: The parent folder. By default, it is the system's folder for temporary files.

    Raises:
        CheckpointError: The folder cannot be created.
    """
    with temporary_folder((folder or Path(tempfile.gettempdir())) / "attnrx") as scratch:
        scratch.chmod(0o700)
        yield scratch


def scratch_file(target: Path) -> IO[bytes]:
    """Opens a temporary file beside `target`.

    The file is deleted when it is closed or, if this process is killed, by the next call.

    Raises:
        InvalidInput: The target is the root of the file system.
        CheckpointError: The target's folder cannot be created.
        OSError: The file cannot be opened.
    """
    target = _prepare_target(target)
    return cast(IO[bytes], tempfile.NamedTemporaryFile(dir=target.parent, prefix=_start(target), suffix=".partial"))


ReplacedFiles = Callable[[Path, Collection[str]], Collection[str]]
"""A function of a folder and the names of new files. It returns the names in the folder that the new files replace."""


def parts_by(is_part: Callable[[Path], bool]) -> ReplacedFiles:
    """Returns a function for `replacing_folder` that names all files in a folder for which `is_part` is true."""
    return lambda folder, written: {each.name for each in folder.iterdir() if is_part(each)}


@contextmanager
def replacing_folder(folder: Path | str, parts: ReplacedFiles, last: str) -> Iterator[Path]:
    """Yields an empty temporary folder. If the block ends without an error, the files in it are moved to `folder`.

    The new folder takes the place of the old one in one step, and only one process at a time does this. If `folder` is
    a mount point or the current folder, it cannot be exchanged. The new files are then moved into it one by one, which
    is only possible if no existing file has to be replaced.

    Args:
        folder: The folder to create or change.
        parts: A function that names the files in `folder` that are replaced together (the parts). Parts that were not
            written again are deleted. All other files are kept, and never overwritten.
        last: The name of the file that is moved last, because it makes the other files valid.

    Raises:
        InvalidInput: A new file has the name of a file in `folder` that is not a part, and would overwrite it.
        CheckpointError: The folder cannot be replaced in one step (nothing was changed), or cannot be written.
    """
    target = _prepare_target(Path(folder))
    if target.exists() and not target.is_dir():
        raise InvalidInput(f"{folder} is a file; name a folder.")
    # If an earlier replacement was interrupted, the folder is restored before the checks below.
    restore(target)
    # If files were moved one by one, their temporary folder was inside the target, so there may be leftovers, too.
    _remove_leftovers(target, target)
    obstacle = _obstacle(target) if target.exists() else None
    temporary = temporary_path(target, target if obstacle else None)
    try:
        temporary.mkdir()
        yield temporary
        # JSON files come first, because they show which of the other files attnrx wrote. The file `last` comes last,
        # because it makes the others valid, e.g. as a JSON file that refers to tensors.
        new = sorted(temporary.iterdir(), key=lambda each: (each.name == last, each.suffix != ".json", each.name))
        for each in new:
            flush(each)
        # The files to keep are listed under the lock, because another process may have replaced the folder until here.
        with file_lock(target):
            written = [each.name for each in new]
            replaced = set(parts(target, written)) if target.exists() else set()
            require_absent([target / name for name in written], lambda path: path.name in replaced)
            if obstacle and replaced:
                raise CheckpointError(
                    f"{folder} holds files that would have to be replaced at once, which is impossible because "
                    f"{obstacle}. Nothing was changed; delete those files first, or choose another folder."
                )
            if obstacle:
                for each in new:
                    each.replace(target / each.name)
                flush(target)
            else:
                if target.exists():
                    _carry_others(target, temporary, replaced)
                swap_folders(temporary, target)
                # After an exchange, `temporary` is the old folder. Files that others have added to it meanwhile are
                # kept. If the folder was renamed instead, `temporary` no longer exists.
                with suppress(OSError):
                    for each in temporary.iterdir():
                        if each.name not in replaced and not os.path.lexists(target / each.name):
                            each.rename(target / each.name)
    except OSError as error:
        raise CheckpointError(
            f"cannot write {folder}: {error.strerror or error}. Free some space or choose another place."
        ) from error
    finally:
        # After an exchange of names, the temporary path is the old folder, which is no longer needed.
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def file_lock(target: Path | str, seconds: float = LOCK_SECONDS) -> Iterator[None]:
    """Holds the lock of a file or a folder within the context. If this process ends, the system releases the lock.

    Other processes and threads wait for the lock. The thread that holds the lock may acquire it again. If locks are not
    possible (a folder without write permission, some network file systems), the block runs without a lock.

    Args:
        target: The file or folder. The lock is a file in the same folder, which is deleted at the end.
        seconds: How many seconds to wait for the lock, or -1 to wait without a limit.

    Raises:
        CheckpointError: Another process or thread held the lock for more than `seconds` seconds.
    """
    target = real_path(target)
    _create_parent(target)
    path = target.with_name(f".{target.name}.lock")
    # There is one lock object per path, which counts how often this thread has acquired it.
    lock = FileLock(path, is_singleton=True)
    try:
        lock.acquire(seconds)
    except Timeout as error:
        raise CheckpointError(
            f"{target} is being written by another process or thread: wait until it has ended, or choose another "
            "folder."
        ) from error
    except OSError:
        pass
    try:
        yield
    finally:
        if lock.lock_counter == 1:
            with suppress(OSError):  # processes that wait for the deleted file will open a new one
                path.unlink()
        lock.release()  # has no effect if the lock is not held


def require_absent(paths: list[Path], is_part: Callable[[Path], bool]) -> None:
    """Raises InvalidInput for an existing path for which `is_part` is false, because it would be overwritten."""
    for path in paths:
        if os.path.lexists(path) and not is_part(path):
            raise InvalidInput(
                f"{path} would be overwritten, and attnrx did not write it: move it away, or choose another folder."
            )


def _remove_leftovers(target: Path, folder: Path) -> None:
    """Deletes temporary files and folders for `target` if the process that wrote them no longer runs."""
    # Leftovers only waste disk space, so a failure to delete them is ignored.
    with suppress(OSError):
        for each in _leftovers(target, folder):
            if each.is_dir() and not each.is_symlink():
                shutil.rmtree(each, ignore_errors=True)
            else:
                each.unlink(missing_ok=True)


def process_runs(number: int) -> bool:
    """Whether a process with this id runs on this machine."""
    if sys.platform == "win32":  # on Windows, os.kill(number, 0) would send Ctrl-C to the process
        system = ctypes.WinDLL("kernel32", use_last_error=True)
        handle = system.OpenProcess(_SYNCHRONIZE, False, number)
        runs = system.WaitForSingleObject(handle, 0) != 0 if handle else ctypes.get_last_error() == _ACCESS_DENIED
        system.CloseHandle(handle)
        return runs
    try:
        with suppress(PermissionError):  # the process runs, but belongs to another user
            os.kill(number, 0)  # signal 0 is not sent, and only checks that the process exists
    except (ProcessLookupError, OverflowError):
        return False
    return True


def real_path(path: Path | str) -> Path:
    """Returns the path without symbolic links, because a rename onto a link would replace the link.

    Raises:
        CheckpointError: The links form a loop, or the system does not allow the path, e.g. because it is too long.
    """
    try:
        target = Path(os.path.realpath(path))
        is_loop = target.is_symlink()  # realpath resolves all links except loops
        target.exists()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{path!s:.200} cannot be written: {reason}; choose another place.") from error
    if is_loop:
        raise CheckpointError(
            f"{path} is a symbolic link that leads back to itself; delete it, or choose another place."
        )
    return target


def _prepare_target(path: Path) -> Path:
    """Follows symbolic links, creates the target's folder, and deletes leftover temporary files for the target."""
    target = real_path(path)
    if not target.name:
        raise InvalidInput(f"{path} is the root of the file system: name a folder or a file in it.")
    _create_parent(target)
    _remove_leftovers(target, target.parent)
    return target


def _create_parent(target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot create the folder {target.parent}: {error.strerror or error}.") from error


def temporary_path(target: Path, folder: Path | None = None) -> Path:
    # The temporary path is in the target's folder, because a rename is only atomic within one file system. Its name
    # contains the host and the process id, by which leftovers are recognized. Random digits distinguish the writes of
    # one process.
    return (folder or target.parent) / f"{_start(target)}{secrets.token_hex(4)}.partial"


def _start(target: Path) -> str:
    return f".{target.name}.{_HOST}-{os.getpid()}-"


def _names(target: Path, suffix: str = "partial") -> re.Pattern[str]:
    """Returns a pattern for the names of this host's temporary files for `target`. Group 1 is the process id."""
    return re.compile(rf"\.{re.escape(target.name)}\.{_HOST}-(\d+)-[0-9a-z_]{{8}}\.{suffix}")


def _leftovers(target: Path, folder: Path, suffix: str = "partial") -> list[Path]:
    """Returns temporary files and folders for `target` whose processes no longer run."""
    matches = [(_names(target, suffix).fullmatch(each.name), each) for each in folder.iterdir()]
    return [each for match, each in matches if match is not None and not process_runs(int(match[1]))]


def _obstacle(folder: Path) -> str | None:
    """Returns the reason why a folder cannot be renamed, or None if it can be renamed."""
    if folder.is_mount():
        return "it is a mount point"
    with suppress(OSError):
        # If the working directory is in the folder, this process would stay in the old folder, which is deleted.
        if Path.cwd().is_relative_to(folder):
            return "it is the current folder, or holds it"
    return None


def _carry_others(target: Path, temporary: Path, replaced: Collection[str]) -> None:
    """Adds the files that are not replaced to the new folder, as hard links or as copies with equal permissions."""

    def ignored(folder: str, names: list[str]) -> list[str]:
        candidates = names if Path(folder) == target else []
        return [name for name in candidates if name in replaced or _names(target).fullmatch(name)]

    # Hard links take neither time nor disk space, even for large files.
    shutil.copytree(target, temporary, symlinks=True, ignore=ignored, copy_function=_link, dirs_exist_ok=True)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # the file system has no hard links
        shutil.copy2(source, target, follow_symlinks=False)


def swap_folders(temporary: Path, target: Path) -> None:
    """Moves the temporary folder to `target`, and replaces the folder that may exist there."""
    flush(temporary)
    if not target.exists():
        temporary.rename(target)
    elif not exchange_names(temporary, target):
        # The old folder gets the suffix .old. If the process is killed now, `restore` moves the folder back.
        old = temporary_path(target).with_suffix(".old")
        target.rename(old)
        try:
            temporary.rename(target)
        finally:
            _keep_one(old, target)
    flush(target.parent)


def exchange_names(first: Path, second: Path) -> bool:
    """Exchanges the names of two folders atomically. Returns False if the system cannot do this.

    Raises:
        OSError: The system can exchange names, but the call failed.
    """
    names = os.fsencode(first), os.fsencode(second)
    # Python has no function that exchanges names, so the C library is called.
    system = None if sys.platform == "win32" else ctypes.CDLL(None, use_errno=True)
    # Python raises an audit event for its own renames. A call by ctypes raises none, so the event is raised here.
    sys.audit("os.rename", str(first), str(second), -1, -1)
    if sys.platform == "linux" and hasattr(system, "renameat2"):
        failed = system.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _SWAP)
    elif sys.platform == "darwin" and hasattr(system, "renamex_np"):
        failed = system.renamex_np(*names, _SWAP)
    else:
        return False
    if failed and ctypes.get_errno() not in _NO_SWAP:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return not failed


def restore(target: Path) -> None:
    """Restores the old folder if a process was killed between the two renames of `swap_folders`."""
    with suppress(OSError):
        for each in _leftovers(target, target.parent, "old"):
            _keep_one(each, target)


def _keep_one(old: Path, target: Path) -> None:
    shutil.rmtree(old, ignore_errors=True) if target.exists() else old.rename(target)


def full_disk(folder: Path, needed: int) -> str | None:
    """Returns the system's message for a full disk, or None if at least `needed` bytes are free on the folder's disk.

    Call this function after a runtime failed to write a file, because the runtime's own message does not mention the
    full disk.
    """
    with suppress(OSError):
        if shutil.disk_usage(folder).free < needed:
            return os.strerror(errno.ENOSPC)
    return None


def flush(path: Path) -> None:
    """Flushes a file, or the entries of a folder, to disk. On systems that cannot flush folders, nothing happens."""
    if path.is_file():
        with path.open("rb") as handle:
            os.fsync(handle.fileno())
        return
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
