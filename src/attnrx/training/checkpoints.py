"""Atomic training checkpoints: each folder is complete or absent."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attnrx.errors import CheckpointError
from attnrx.serialization.storage import (
    check_schema,
    file_sha256,
    read_json,
    read_tensors,
    require_finite_tensors,
    write_json,
    write_tensors,
)
from attnrx.shapes import Tensor

KIND, SCHEMA = "attnrx training state", 1
KEPT = 2


class Checkpoints:
    """The last checkpoints of a run, `checkpoints/step-00000420/` with state.json and state.safetensors.

    A new one is written under a hidden name and then renamed, so that only complete ones exist after an interruption.
    """

    def __init__(self, folder: Path):
        self.folder = folder / "checkpoints"

    def all(self) -> list[Path]:
        """Returns the checkpoints, oldest first."""
        return sorted(self.folder.glob("step-*"))

    def path(self, step: int) -> Path:
        """Returns the folder of a step."""
        return self.folder / f"step-{step:08d}"

    def write(self, step: int, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> Path:
        """Adds a checkpoint; raises an error for values that are not finite."""
        require_finite_tensors(tensors, f"the state of step {step}")
        path = self.path(step)
        if path.exists():
            return path
        partial = self.folder / f".{path.name}.partial"
        try:
            shutil.rmtree(partial, ignore_errors=True)
            file = write_tensors(partial / "state.safetensors", tensors)
            content = {"kind": KIND, "schema": SCHEMA, "step": step, "sha256": file_sha256(file), **record}
            write_json(partial / "state.json", content)
            partial.rename(path)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        for old in self.all()[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)
        return path

    def read(self) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """Returns the newest checkpoint, or None; a damaged one raises CheckpointError and is never skipped."""
        found = self.all()
        if not found:
            return None
        path = found[-1]
        try:
            record = read_json(path / "state.json")
            check_schema(record, KIND, SCHEMA, path / "state.json")
            return record, read_tensors(path / "state.safetensors", record.get("sha256"))
        except CheckpointError as error:
            before = f"from {found[-2].name}" if len(found) > 1 else "from the beginning"
            raise CheckpointError(f"{error} Delete the folder {path} to resume {before}.") from error
