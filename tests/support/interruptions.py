"""What a process leaves on the disk if it is killed: a copy of a folder at every file-system event of a call."""

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

# Audit events of Python that precede a change of the file system; opening counts where it is for writing.
CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


@dataclass
class Watch:
    """The changes within a folder, and what is done before each."""

    root: Path
    act: Callable[[int], object]
    events: list[str] = field(default_factory=list)
    written: list[Path] = field(default_factory=list)
    busy: bool = False


_watch: Watch | None = None
_hooked: list[bool] = []


def _hook(event: str, args: tuple) -> None:
    if _watch is None or _watch.busy or (event != "open" and event not in CHANGES):
        return
    if event == "open" and not (isinstance(args[0], str | bytes) and args[2] & WRITING):
        return
    path = os.fsdecode(args[0])
    # A relative name is that of an entry of a folder which is being deleted.
    if path.startswith("/") and not path.startswith(f"{_watch.root}/"):
        return
    _watch.busy = True
    try:
        if event == "open":
            _watch.written.append(Path(path))
        _watch.events.append(f"{event} {path}")
        _watch.act(len(_watch.events))
    finally:
        _watch.busy = False


def watched(root: Path, call: Callable[[], object], act: Callable[[int], object]) -> Watch:
    """Calls a function, and `act` before every change within `root`."""
    global _watch
    if not _hooked:
        sys.addaudithook(_hook)  # which cannot be removed, and does nothing while no watch is set
        _hooked.append(True)
    _watch = found = Watch(root, act)
    try:
        call()
    finally:
        _watch = None
    return found


def snapshots(root: Path, call: Callable[[], object], copies: Path) -> tuple[Watch, list[Path]]:
    """Gives copies of a folder before every change that a call makes in it, and after the last one.

    A killed process leaves exactly these states: what it had buffered is in none of them.
    """
    found: list[Path] = []

    def copy(number: int) -> None:
        found.append(copies / f"{number:04d}")
        shutil.copytree(root, found[-1], symlinks=True)

    watch = watched(root, call, copy)
    copy(len(watch.events) + 1)
    return watch, found


def visible(folder: Path) -> dict[str, bytes]:
    """The content of every file, without temporary ones."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not any(part.endswith(".partial") for part in path.relative_to(folder).parts)
    }
