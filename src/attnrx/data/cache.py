"""Decoded copies of small-image datasets in the user's cache folder, so that only the first load decodes."""

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from attnrx.data.geometry import ImageGeometry
from attnrx.errors import CheckpointError
from attnrx.runtime.hardware import cache_folder
from attnrx.serialization.storage import read_json, read_tensors, write_json, write_tensors
from attnrx.shapes import Int, Tensor, UInt8

SCHEMA = 1  # raise it when decoding or resizing changes, so that old copies are not used


@dataclass(frozen=True)
class DecodedSplit:
    """One split as pixels; `sources` are the rows the images had in the file."""

    pixels: UInt8[Tensor, "stored channels height width"]
    labels: Int[Tensor, "stored"]
    sources: Int[Tensor, "stored"]


@dataclass(frozen=True)
class Decoded:
    """A whole dataset as pixels, with its class names, geometry and notes."""

    splits: Mapping[str, DecodedSplit]
    class_names: tuple[str, ...]
    geometry: ImageGeometry
    notes: tuple[str, ...]


def cache_path(*parts: object) -> Path:
    """Returns the path of the decoded copy of a source with its options."""
    key = hashlib.sha256(repr((SCHEMA, *parts)).encode()).hexdigest()[:24]
    return cache_folder() / "decoded" / f"{key}.safetensors"


def store(path: Path, decoded: Decoded) -> None:
    """Writes a decoded copy: tensors first, then the JSON that makes it valid. A full disk costs only the copy."""
    tensors = {
        f"{name}.{part}": getattr(split, part)
        for name, split in decoded.splits.items()
        for part in ("pixels", "labels", "sources")
    }
    about = {
        "splits": list(decoded.splits),
        "class_names": list(decoded.class_names),
        "geometry": [decoded.geometry.size, decoded.geometry.channels, decoded.geometry.fit],
        "notes": list(decoded.notes),
    }
    try:
        write_tensors(path, tensors)
        write_json(path.with_suffix(".json"), about)
    except CheckpointError:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def fetch(path: Path) -> Decoded | None:
    """Reads a decoded copy back, or returns None if it is missing or damaged."""
    try:
        about = read_json(path.with_suffix(".json"))
        tensors = read_tensors(path)
        splits = {
            name: DecodedSplit(tensors[f"{name}.pixels"], tensors[f"{name}.labels"], tensors[f"{name}.sources"])
            for name in about["splits"]
        }
        return Decoded(splits, tuple(about["class_names"]), ImageGeometry(*about["geometry"]), tuple(about["notes"]))
    except (CheckpointError, KeyError, TypeError):
        return None
