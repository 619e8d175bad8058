"""Converts files that earlier versions wrote. All differences between versions are handled in this module.

`converted` is called whenever a file of attnrx is loaded, before the file is validated. Files of earlier versions are
in `tests/saved`.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attnrx.support.errors import CheckpointError
from attnrx.support.seals import SEAL, sealed

Entries = Mapping[str, Any]

# The old and new names of types, and the fields that types no longer have, with the value at which the field had no
# effect. A field with this value is dropped, and any other value raises an error.
RENAMED = {"ModelParts": "ViTParts"}
LOST: Mapping[str, Entries] = {"TokenPolicy": {"by_image": False, "thresholds": {"tuple": []}}}


def converted(record: Entries, path: Path | str) -> dict[str, Any]:
    """Converts the record of the file at `path` to the form that this version writes.

    Raises:
        CheckpointError: The record has a setting that this version no longer supports. The message names the setting.
    """
    convert = KINDS.get(record["kind"], lambda record, path: dict(record))
    return {name: _of_types(value) for name, value in convert(record, Path(path)).items()}


def _of_types(value: Any) -> Any:
    """Converts all JSON objects with a field `type` (the records of dataclasses), however deep they are in a value."""
    if isinstance(value, list):
        return [_of_types(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    name = value.get("type")
    if isinstance(name, str):
        value = _without(value, LOST.get(name, {}), name) | {"type": RENAMED.get(name, name)}
    return {key: _of_types(item) for key, item in value.items()}


def _without(record: Entries, lost: Entries, name: str) -> dict[str, Any]:
    """Returns a record without the fields in `lost`.

    Raises:
        CheckpointError: The value of a field differs from its value in `lost`, so the field cannot be dropped.
    """
    for key, value in lost.items():
        if key in record and record[key] != value:
            raise CheckpointError(
                f"an earlier version made this {name} with {key} = {record[key]!s:.100}, which this one no longer has: "
                "make it again."
            )
    return {key: value for key, value in record.items() if key not in lost}


def _prescription(record: Entries, path: Path) -> dict[str, Any]:
    about = record.get("about")
    how = about.get("realized") if isinstance(about, Mapping) else None
    if not isinstance(about, Mapping) or not isinstance(how, Mapping):
        return dict(record)
    # Earlier versions stored the compression's norms in their own field. They could also fit queries and keys
    # (`refine`), which this version cannot.
    norms = how.get("norms", "exact")
    how = {key: value for key, value in how.items() if key != "norms"}
    if norms != "exact" and how.get("by") == "compress":
        how["by"] = norms
    how = _without(how, {"refine": 0}, "prescription")
    if isinstance(how.get("settings"), Mapping):
        how["settings"] = {key: value for key, value in how["settings"].items() if key != "refine"}
    return {**record, "about": {**about, "realized": how}}


def _plan(record: Entries, path: Path) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != "front"}


def _evidence(record: Entries, path: Path) -> dict[str, Any]:
    """Returns evidence with schema 3. Schema 2 had no seal (a hash of the content), so a seal is added."""
    if record.get("schema") != 2:
        return dict(record)
    return sealed({name: _of_types(value) for name, value in record.items() if name != SEAL} | {"schema": 3})


def _elastic(record: Entries, path: Path) -> dict[str, Any]:
    sizes, about = record.get("sizes"), record.get("about")
    if not isinstance(sizes, list) or not isinstance(about, Mapping):
        return dict(record)
    if not all(isinstance(size, Mapping) for size in sizes):
        return dict(record)
    kept = [{key: value for key, value in size.items() if key != "reduces_tokens"} for size in sizes]
    about = dict(about)
    for size in kept:
        if "fingerprint" in size:
            continue
        # The index of an earlier version only had the original's fingerprint. A size's own fingerprint and the
        # original's costs are in the evidence of the size.
        if size.get("name") == "original":
            size["fingerprint"] = about.get("fingerprint")
            continue
        candidate, costs = _measured(path.parent, str(size.get("name")))
        size["fingerprint"] = candidate
        about = {**costs, **about}
    return {**record, "sizes": kept, "about": about}


def _measured(folder: Path, size: str) -> tuple[str, dict[str, int]]:
    """Reads the fingerprint of one size of an elastic model, and the original's costs, from the size's evidence.

    Raises:
        CheckpointError: The evidence is missing, or lacks the fingerprint or the costs.
    """
    try:
        # Only the last part of the name is used, because a name with a separator could lead out of the folder.
        evidence = json.loads((folder / Path(size).name / "evidence.json").read_bytes())
        details = {each["details"].get("quantity"): each["details"] for each in evidence["findings"]}
        costs = {"macs": details["MACs"]["reference"], "params": details["parameters"]["reference"]}
        return evidence["about"]["candidate"], costs
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"an earlier version wrote the index of {folder} without the fingerprints of its sizes, and the size "
            f"{size:.80} has no evidence that states it: make the sizes again with attnrx.elastic."
        ) from error


def _model(record: Entries, path: Path) -> dict[str, Any]:
    model = record.get("model")
    if record.get("family") != "whole" or not isinstance(model, Mapping):
        return dict(record)
    # A user's module was stored with two families: its own, and the family of the Vision Transformer inside it.
    around = model.get("around")
    family = around.get("family") if isinstance(around, Mapping) else None
    if not isinstance(around, Mapping) or not isinstance(family, str):
        raise CheckpointError("config.json: model.around.family is missing; it names the family of the model.")
    around = {key: value for key, value in around.items() if key != "family"}
    return {**record, "family": family, "model": {**model, "around": around}}


def converted_names(record: Entries, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tensors of a model's file, keyed by this version's names. `record` describes the stored model."""
    if record.get("family") != "whole":
        return dict(tensors)
    return {_renamed(name, "module.", "source."): tensor for name, tensor in tensors.items()}


def fingerprinted_names(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tensors of a user's module, keyed by the names that its fingerprint is computed from.

    These are still the old names, so that the fingerprint equals the one in documents of earlier versions.
    """
    return {_renamed(name, "source.", "module."): tensor for name, tensor in tensors.items()}


def _renamed(name: str, before: str, after: str) -> str:
    return after + name.removeprefix(before) if name.startswith(before) else name


def _exported(record: Entries, _: Path) -> dict[str, Any]:
    # The setting `tolerance` of the quantization is dropped, because nobody who runs the file needs it.
    form = record.get("format")
    if not isinstance(form, Mapping):
        return dict(record)
    return {**record, "format": {key: value for key, value in form.items() if key != "tolerance"}}


# The converters by the kind of the file.
KINDS: Mapping[str, Callable[[Entries, Path], dict[str, Any]]] = {
    "attnrx prescription": _prescription,
    "attnrx plan": _plan,
    "attnrx elastic model": _elastic,
    "attnrx model": _model,
    "attnrx evidence": _evidence,
    "attnrx exported model": _exported,
}
