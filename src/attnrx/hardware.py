"""What was measured on this machine before, kept in one file of the user's cache folder."""

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from attnrx.errors import CheckpointError
from attnrx.storage import read_json, write_json

CACHE, MEASURE = "ATTNRX_CACHE", "ATTNRX_MEASURE"
KIND, SCHEMA = "attnrx measurements", 1


def device_name(device: str) -> str:
    """Names the hardware behind a device."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    if torch.device(device).type != "cpu":
        return device
    cpus = Path("/proc/cpuinfo")
    if cpus.exists():
        for line in cpus.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cache_folder() -> Path:
    """Gives the folder for what can be measured again: $ATTNRX_CACHE, or attnrx in the user's cache folder."""
    if os.environ.get(CACHE):
        return Path(os.environ[CACHE])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "attnrx"


def may_measure() -> bool:
    """Whether measuring is allowed: unless ATTNRX_MEASURE is 0."""
    return os.environ.get(MEASURE, "1") != "0"


class Measurements:
    """Records by key, for the hardware at hand and this version of torch; those of other machines are left alone.

    `path` is a file that may be written by one machine and read by others; None takes that of the cache folder. With
    `pinned` nothing is ever written: the file says all that is known. A damaged file in the cache folder counts as
    empty, one that was named is refused.
    """

    def __init__(self, device: str, path: Path | str | None = None, pinned: bool = False):
        self.path = cache_folder() / "measurements.json" if path is None else Path(path)
        self.pinned = pinned
        self._named = path is not None
        self._machine = f"{device_name(device)}, torch {torch.__version__}"
        if pinned and not self.path.exists():
            raise CheckpointError(f"{self.path} does not exist, so it cannot say what is to be used; measure first.")
        self._records = self._read().get(self._machine, {})

    def get(self, key: str) -> Mapping[str, Any] | None:
        """Gives what is known of a key."""
        return self._records.get(key)

    def put(self, key: str, record: Mapping[str, Any]) -> None:
        """Keeps a record, on disk too where that is possible."""
        self._records[key] = dict(record)
        if self.pinned:
            return
        machines = self._read()  # another process may have written meanwhile
        machines[self._machine] = {**machines.get(self._machine, {}), **self._records}
        try:
            write_json(self.path, {"kind": KIND, "schema": SCHEMA, "machines": machines})
        except CheckpointError:
            if self._named:
                raise  # a cache folder that cannot be written only costs measuring again

    def _read(self) -> dict[str, dict[str, Any]]:
        if not self.path.exists():
            return {}
        try:
            found = read_json(self.path)
            if (found.get("kind"), found.get("schema")) != (KIND, SCHEMA):
                raise CheckpointError(f"{self.path} holds no {KIND} of schema {SCHEMA}; delete it or name another.")
            return dict(found["machines"])
        except CheckpointError:
            if self._named:
                raise
            return {}
