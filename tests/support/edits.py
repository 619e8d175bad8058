"""Copies of JSON files with one field changed, as a person would edit them."""

import copy
import json
import re
from pathlib import Path
from typing import Any


class _Absent:
    """Removes the field; its text names the test, the same in every process."""

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT = _Absent()


def edited(record: Any, field: str, value: Any) -> Any:
    """A copy of the record in which the field, e.g. `layers[0].heads[1].keep`, has another value."""
    changed = copy.deepcopy(record)
    *above, last = [int(part[1:-1]) if part[0] == "[" else part for part in re.findall(r"\[\d+\]|[^.\[\]]+", field)]
    place = changed
    for part in above:
        place = place[part]
    if value is ABSENT:
        del place[last]
    else:
        place[last] = value
    return changed


def write_edited(path: Path, source: Path, field: str, value: Any) -> Path:
    """Writes the edited copy of a file; NaN and infinity are written as Python's json writes them."""
    path.write_text(json.dumps(edited(json.loads(source.read_text()), field, value)))
    return path
