"""A model as a folder: config.json says what it is, model.safetensors holds its weights."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from attnrx.errors import CheckpointError, InvalidInput, UnknownName
from attnrx.models.family import Family
from attnrx.models.reducing import attach_described_, described_tokens
from attnrx.storage import (
    check_schema,
    check_seal,
    file_sha256,
    read_json,
    read_tensors,
    require_finite,
    sealed,
    write_json,
    write_tensors,
)

KIND, SCHEMA = "attnrx model", 1


def save_weights(folder: Path | str, model: nn.Module, family: Family, notes: dict[str, Any] | None = None) -> Path:
    """Writes the two files; the config goes last, so a folder with a config is a whole model."""
    folder = Path(folder)
    tensors = dict(model.state_dict())
    require_finite(tensors, "the model to save")
    weights = write_tensors(folder / "model.safetensors", tensors)
    record = {
        "kind": KIND,
        "schema": SCHEMA,
        "family": family.name,
        "model": family.describe(model),
        "tokens": described_tokens(model),
        "weights_sha256": file_sha256(weights),
        "notes": notes or {},
    }
    write_json(folder / "config.json", sealed(record))
    return folder


def load_weights(folder: Path | str, families: tuple[Family, ...]) -> nn.Module:
    """Builds the model on the meta device and fills it strictly with the saved weights, in evaluation mode."""
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder with a saved model (config.json and model.safetensors).")
    path = folder / "config.json"
    record = read_json(path)
    check_schema(record, KIND, SCHEMA, path)
    check_seal(record, path)
    known = {family.name: family for family in families}
    if record.get("family") not in known:
        raise UnknownName("model family", str(record.get("family")), known)
    tensors = read_tensors(folder / "model.safetensors", record.get("weights_sha256"))
    require_finite(tensors, str(folder / "model.safetensors"))
    try:
        with torch.device("meta"):
            family = known[record["family"]]
            model = family.build(record["model"])
            if record.get("tokens") is not None:
                attach_described_(model, family, record["tokens"])
        model.load_state_dict(tensors, strict=True, assign=True)
    except (InvalidInput, UnknownName, RuntimeError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{folder}: the weights do not fit config.json ({error}). One of the files is not its own."
        ) from error
    return model.eval()
