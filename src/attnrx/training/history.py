"""The history of a run: one line of JSON for every epoch."""

import json
from pathlib import Path
from typing import Any

from attnrx.errors import CheckpointError
from attnrx.serialization.storage import write_text


class History:
    """`history.jsonl`: line n is epoch n, also after interruptions and repeated epochs."""

    def __init__(self, folder: Path):
        self.path = folder / "history.jsonl"
        self.records: list[dict[str, Any]] = []

    def restore(self, epochs: int, write: bool = True) -> None:
        """Reads the first `epochs` records and discards later ones, whose steps will be repeated."""
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        try:
            self.records = [json.loads(line) for line in lines[:epochs]]
        except json.JSONDecodeError as error:
            raise CheckpointError(
                f"{self.path} is damaged ({error}); delete the run's folder and train again."
            ) from error
        if len(self.records) < epochs:
            raise CheckpointError(
                f"{self.path} has {len(self.records)} epochs and the checkpoint {epochs}: lines were removed. "
                "Put the file back, or delete the run's folder and train again."
            )
        if write:
            self.write()

    def write(self) -> None:
        """Writes the records to the file, atomically."""
        write_text(self.path, "".join(json.dumps(record) + "\n" for record in self.records))
