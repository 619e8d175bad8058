"""Data files: the endings of images, a stamp that changes with the files, and the split that a path names."""

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from attnrx.data.stored import SPLITS
from attnrx.errors import DataError
from attnrx.serialization.validation import require_regular

IMAGES = frozenset((".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".ppm", ".pgm", ".tif", ".tiff"))


def stamp(files: Iterable[Path]) -> str:
    """Hashes the paths, sizes and modification times of files."""
    found = hashlib.sha256()
    for file in files:
        status = require_regular(file, DataError).stat()
        found.update(f"{file.absolute()}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return found.hexdigest()


def split_in_path(path: Path | str) -> str:
    """Returns the split that a path names (`val/0001.tar`, `train-00000-of-00002.parquet`), or an empty text."""
    words = re.split(r"[^a-z]+", str(path).lower())
    return next((SPLITS[word] for word in words if word in SPLITS), "")


def group_by_split(files: Iterable[Path], root: Path) -> Mapping[str, tuple[Path, ...]]:
    """Groups files by the split that their name or folder below `root` names; files without one form the group ""."""
    files = tuple(files)
    groups: dict[str, list[Path]] = defaultdict(list)
    for file in files:
        below = file.relative_to(root) if file.is_relative_to(root) and file != root else Path(file.name)
        groups[split_in_path(below) if len(files) > 1 else ""].append(file)
    if "" in groups and len(groups) > 1:
        raise DataError(
            f"{root} holds files of {', '.join(sorted(name for name in groups if name))}, but {groups[''][0].name} "
            "belongs to no split; put train, validation or test into every file name, or into its folder's."
        )
    return {name: tuple(sorted(group)) for name, group in groups.items()}
