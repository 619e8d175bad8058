"""Seals for JSON files. A seal is a hash of the file's content, which is stored in the file and reveals later edits."""

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attnrx.support.errors import CheckpointError

SEAL = "sha256_of_the_rest"


def sealed(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a record with a hash of its content (its seal), which `check_seal` verifies."""
    return {**record, SEAL: _seal(record)}


def check_seal(record: Mapping[str, Any], path: Path | str, advice: str = "Save the model again.") -> None:
    """Raises CheckpointError, with `advice` in its message, if a record does not match the hash that `sealed` added."""
    if record.get(SEAL) != _seal(record):
        raise CheckpointError(f"{path} was changed after it was written (its own hash differs). {advice}")


def _seal(record: Mapping[str, Any]) -> str:
    # Keys are sorted, so that the hash does not depend on the order of the fields.
    content = json.dumps(finite_json({key: value for key, value in record.items() if key != SEAL}), sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def finite_json(value: Any) -> Any:
    """Converts a value for JSON: NaN and infinity become None, keys become strings, and tuples become lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite_json(item) for item in value]
    return value
