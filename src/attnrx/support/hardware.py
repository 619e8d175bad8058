"""Measurements of this machine, cached in one file of the user's cache folder."""

import os
import platform
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from attnrx.support.errors import CacheWarning, CheckpointError
from attnrx.support.storage import check_schema, read_json, write_json

CACHE, MEASURE = "ATTNRX_CACHE", "ATTNRX_MEASURE"
KIND, SCHEMA = "attnrx measurements", 1


def device_name(device: str) -> str:
    """

    Returns the name of the processor or graphics card of a device, e.g. "cpu" or "cuda:0".
    """
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    if torch.device(device).type != "cpu":
        return device
    cpus = Path("/proc/cpuinfo")  # of Linux, where platform.processor() returns the architecture only
    lines = cpus.read_text(encoding="utf-8", errors="replace").splitlines() if cpus.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def cache_folder() -> Path:
    """Returns the cache folder: $ATTNRX_CACHE, or attnrx in the user's cache folder."""
    if os.environ.get(CACHE):
        return Path(os.environ[CACHE])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "attnrx"


def may_measure() -> bool:
    """Whether measurements are allowed: false if ATTNRX_MEASURE is 0."""
    return os.environ.get(MEASURE, "1") != "0"


class Measurements:
    """Records by key for this hardware and this version of torch; records of other machines are preserved.

    `path` is a file that several machines may share; None selects the file of the cache folder. With `pinned` the file
    is read-only. Damaged content of the cache folder is ignored with a `CacheWarning` and measured again; damaged
    content of a file given by `path` raises a `CheckpointError`.
    """

    def __init__(self, device: str, path: Path | str | None = None, pinned: bool = False):
        self.path = cache_folder() / "measurements.json" if path is None else Path(path)
        self.pinned = pinned
        self._named = path is not None
        # The version too, because another torch may have other kernels, and so other latencies.
        self._machine = f"{device_name(device)}, torch {torch.__version__}"
        if pinned and not self.path.exists():
            raise CheckpointError(f"{self.path} does not exist, so it has no measurements to use; measure first.")
        self._warned = False
        self._records = self._read().get(self._machine, {})

    def get(self, key: str, is_valid: Callable[[Mapping[str, Any]], bool] = bool) -> Mapping[str, Any] | None:
        """Returns the record of a key; None if there is none or it is not valid."""
        record = self._records.get(key)
        if record is None or is_valid(record):
            return record
        self._ignore(CheckpointError(f"{self.path}: the record {key!r} is damaged; delete it or name another file."))
        return None

    def put(self, key: str, record: Mapping[str, Any]) -> None:
        """Stores a record in memory and, unless `pinned`, in the file."""
        self._records[key] = dict(record)
        if self.pinned:
            return
        machines = self._read()  # another process may have written since
        machines[self._machine] = {**machines.get(self._machine, {}), **self._records}
        try:
            write_json(self.path, {"kind": KIND, "schema": SCHEMA, "machines": machines})
        except CheckpointError:
            if self._named:
                raise  # an unwritable cache folder is no error: the next run measures again

    def _read(self) -> dict[str, dict[str, Any]]:
        if not self.path.exists():
            return {}
        try:
            content = read_json(self.path)
            check_schema(content, KIND, SCHEMA, self.path)
            # Machine, key and record; the fields of a record are checked by `get`.
            if not _is_nested(content.get("machines"), 3):
                raise CheckpointError(f"{self.path} holds no records by machine and key; delete it or name another.")
            return dict(content["machines"])
        except CheckpointError as error:
            self._ignore(error)
            return {}

    def _ignore(self, error: CheckpointError) -> None:
        """Warns once of damage in the cache folder; raises the error for a file given by `path`."""
        if self._named:
            raise error
        if not self._warned:  # the file is read again at every `put`
            warnings.warn(f"{error} It is ignored and measured anew.", CacheWarning, stacklevel=4)
        self._warned = True


def _is_nested(value: object, depth: int) -> bool:
    """Whether the value consists of dictionaries nested `depth` levels deep."""
    return depth == 0 or (isinstance(value, dict) and all(_is_nested(each, depth - 1) for each in value.values()))
