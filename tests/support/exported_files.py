"""Files in the formats of exported models, which anybody can write."""

from pathlib import Path

from attnrx.exporting import FORMATS
from attnrx.support.records import to_dict
from attnrx.support.storage import file_sha256, write_json


def planted(folder: Path, form: str) -> Path:
    """A file of this format with facts that name its hash, as anybody can write them."""
    path = folder / f"model{FORMATS[form].suffix}"
    path.write_bytes(b"content")
    images = {"shape": [3, 8, 8], "precision": "float32", "batch": None, "device": "cpu"}
    facts = {"kind": "attnrx exported model", "schema": 1, "format": to_dict(FORMATS[form]()), "images": images}
    facts |= {"normalization": {"mean": [0.5] * 3, "std": [0.5] * 3}, "class_names": []}
    write_json(folder / f"{path.name}.json", {**facts, "files": {path.name: file_sha256(path)}})
    return path
