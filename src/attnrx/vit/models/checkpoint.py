"""Saves models to folders and loads them. A folder contains config.json, model.safetensors and other files.

Saving replaces all files of an earlier model (PARTS) together, so a folder never mixes files of two models. Other
files in the folder, such as notes and training checkpoints, are kept. A portable model (`boundary/stock.py`) is saved
in its library's checkpoint format, with an additional file attnrx.json.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attnrx.support import arguments as kinds
from attnrx.support.arguments import described
from attnrx.support.atomic_writes import ReplacedFiles, parts_by, replacing_folder, require_absent, restore
from attnrx.support.earlier_versions import converted, converted_names
from attnrx.support.errors import CheckpointError, InvalidInput, nearest
from attnrx.support.foreign_files import open_pickle
from attnrx.support.modules import load_tensors_
from attnrx.support.records import MAX_HEADS, validated
from attnrx.support.seals import SEAL, check_seal, sealed
from attnrx.support.shapes import Tensor
from attnrx.support.storage import (
    check_schema,
    file_kind,
    file_sha256,
    read_json,
    read_tensors,
    require_finite_tensors,
    write_json,
    write_tensors,
)
from attnrx.vit.maps import REALIZATIONS
from attnrx.vit.models.family import Family, require_ordinary_tensors, state_outputs_, stated_outputs
from attnrx.vit.models.working.token_hooks import attach_tokens_, described_tokens
from attnrx.vit.tokens import policy_from_dict

KIND, SCHEMA = "attnrx model", 1
MOST_BYTES = 2**24  # the largest config.json (4,096 layers need 3 MB)
DEPTHS = ("depth", "num_hidden_layers")  # the names of timm and transformers for the number of layers
STOCK_DEPTHS = (*DEPTHS, "num_layers", "layers")  # also the names of torchvision and open_clip
STATE_KEYS = ("state_dict_ema", "model_ema", "state_dict", "model")  # averaged weights come first, as in timm
MOST_NUMBER = 2**20  # the most layers, features, classes etc. This limit is checked before anything is built
# Two fields for transformers. Without these, it would ignore config.json and initialize a model with random weights.
# Given both fields, its Auto classes and `pipeline` refuse the model type, and its classes refuse the attention. Their
# error messages quote the values. transformers' Trainer can still read the file.
FOR_TRANSFORMERS = {
    "model_type": "attnrx: open it by attnrx.load(folder)",
    "attn_implementation": "none: it is a model of attnrx, opened by attnrx.load(folder)",
}
COUNTED = ("macs", "outer_macs", "unit_macs", "sizes")  # counts, which may be larger because nothing is built from them
OUTPUTS = ("logits", "multilabel", "regression", "embedding", "map")
TOKENS = kinds.record(
    {"policy": kinds.bounded(MOST_NUMBER), "by": kinds.one_of(*REALIZATIONS), "heads": kinds.whole(1, MAX_HEADS)}
)
RECORD = kinds.record(
    {
        "kind": kinds.one_of(KIND),
        "schema": kinds.one_of(SCHEMA),
        "family": kinds.ANY_TEXT,
        "model": kinds.bounded(MOST_NUMBER, COUNTED),
        "tokens": kinds.optional(TOKENS),
        "weights_sha256": kinds.ANY_TEXT,
        "notes": kinds.JSON_OBJECT,
        SEAL: kinds.ANY_TEXT,
    },
    more={**dict.fromkeys(FOR_TRANSFORMERS, kinds.ANY_TEXT), "outputs": kinds.optional(kinds.one_of(*OUTPUTS))},
)

# The file that attnrx reads for a portable model. Its config.json belongs to the library.
STOCK = "attnrx.json"
# Files of portable models that libraries read. They cannot hold attnrx's marker, so attnrx.json lists their hashes.
LIBRARY_FILES = ("config.json", "open_clip_config.json", "modeling.py")
STOCK_RECORD = kinds.record(
    {
        "kind": kinds.one_of(KIND),
        "schema": kinds.one_of(SCHEMA),
        "family": kinds.ANY_TEXT,
        "model": kinds.bounded(MOST_NUMBER),
        "outputs": kinds.optional(kinds.one_of(*OUTPUTS)),
        "weights_sha256": kinds.ANY_TEXT,
        "files": kinds.JSON_OBJECT,
        SEAL: kinds.ANY_TEXT,
    }
)

# For each file name: the kind that is written inside the file as a marker.
PARTS = {
    "config.json": KIND,
    STOCK: KIND,
    "model.safetensors": f"{KIND} weights",
    "prescription.json": "attnrx prescription",
    "evidence.json": "attnrx evidence",
    "training.json": "attnrx training run",
    "preprocessor_config.json": "attnrx image processor",
    "README.md": "attnrx model card",
}
_TENSORS = re.compile(r"prescription\.json\.tensors-[0-9a-f]{12}\.safetensors")


def save_weights(
    folder: Path | str,
    model: nn.Module,
    family: Family,
    notes: dict[str, Any] | None = None,
    write_beside: Callable[[Path], object] | None = None,
    parts: ReplacedFiles | None = None,
) -> Path:
    """Saves a model to a folder, and replaces an earlier model there in one atomic step.

    `write_beside` writes more files into the folder. `parts` are the files to replace, by default all files of a model
    (PARTS).

    Raises:
        NotSupported: The model has quantized modules, or blocks with shared weights.
        InvalidInput: Weights are on the meta device, are not finite, or have several floating-point types.
    """
    folder = Path(folder)
    require_ordinary_tensors(model, family.block_names(model))
    tensors = dict(model.state_dict())
    require_finite_tensors(tensors, "the model to save")
    # config.json is replaced last, because it makes the folder a model.
    with replacing_folder(folder, parts or parts_by(is_model_file), last="config.json") as new:
        weights = write_tensors(new / "model.safetensors", tensors, {"kind": PARTS["model.safetensors"]})
        record = {
            "kind": KIND,
            "schema": SCHEMA,
            "family": family.name,
            "model": family.describe(model),
            "tokens": described_tokens(model),
            "outputs": stated_outputs(model),
            "weights_sha256": file_sha256(weights),
            "notes": notes or {},
            **FOR_TRANSFORMERS,
        }
        write_json(new / "config.json", sealed(record))
        write_processor(new, family, model)
        if write_beside is not None:
            write_beside(new)
    return folder


def write_processor(folder: Path, family: Family, model: nn.Module) -> None:
    """Writes preprocessor_config.json for transformers' image processor, if the model's family provides one."""
    if processor := family.processor_config(model):
        name = "preprocessor_config.json"
        write_json(folder / name, {"kind": PARTS[name], **processor})


def is_model_file(path: Path) -> bool:
    """Returns whether a file belongs to a model that attnrx saved, judging by the file's name and content."""
    # A user's own file may have one of these names. Only files with the marker are replaced.
    kind = f"{PARTS['prescription.json']} tensors" if _TENSORS.fullmatch(path.name) else PARTS.get(path.name)
    if kind is not None and file_kind(path) == kind:
        return True
    if path.name not in LIBRARY_FILES or not path.is_file() or file_kind(path.with_name(STOCK)) != KIND:
        return False
    files = read_json(path.with_name(STOCK), MOST_BYTES).get("files")
    return isinstance(files, Mapping) and files.get(path.name) == file_sha256(path)


def is_model_folder(folder: Path | str) -> bool:
    """Returns whether a folder contains a model that attnrx saved."""
    return any(file_kind(Path(folder) / name) == KIND for name in (STOCK, "config.json"))


def require_model_folder(folder: Path | str, names: Iterable[str] = PARTS) -> None:
    """Checks that a model can be saved in a folder.

    Raises:
        InvalidInput: The path is a file.
        CheckpointError: The folder contains a file named in `names` that does not belong to a saved model.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise InvalidInput(f"{folder} is a file; name a folder.")
    require_absent([folder / name for name in names], is_model_file)


Build = Callable[[Family, Mapping[str, Any]], nn.Module]


def load_weights(folder: Path | str, families: Mapping[str, Family], build: Build) -> nn.Module:
    """Builds a saved model on the meta device, and then loads its weights. All names and shapes must match.

    Args:
        folder: The folder of a saved model.
        families: All families, by name.
        build: A function that creates the model from its family and description.

    Raises:
        CheckpointError: The folder is not a saved model, its family is unknown, a file was damaged or edited, or the
            weights do not fit.
    """
    folder = Path(folder)
    if not folder.is_dir():
        restore(folder)  # an earlier replacement may have been interrupted
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder with a saved model (config.json and model.safetensors).")
    if (folder / STOCK).exists():
        return _load_stock(folder, families)
    path = folder / "config.json"
    if not path.exists() and (folder / "model.safetensors").exists():
        raise CheckpointError(
            f"{folder} has weights (model.safetensors), but no config.json. The Trainer of transformers saves models "
            f"of attnrx like that: load them as attnrx.load(FOLDER_OF_THE_MODEL, weights={str(folder)!r}), or save "
            "the model with attnrx.save(trainer.model, folder)."
        )
    record, family, tensors = _opened(path, RECORD, families)
    _require_depth(record["model"], tensors, path)
    source, tokens = folder / "model.safetensors", record["tokens"]
    try:
        with torch.device("meta"):
            model = build(family, record["model"])
            # The policy is attached before the weights are loaded, because they include its predictors' weights.
            if tokens is not None:
                attach_tokens_(model, family, policy_from_dict(tokens["policy"]), tokens["by"], tokens["heads"])
    except Exception as error:  # timm and transformers build from the record too and raise their own errors
        raise CheckpointError(f"{folder}: the model of config.json cannot be built: {error}") from error
    try:
        load_tensors_(model, tensors)
        require_ordinary_tensors(model, family.block_names(model))
    except Exception as error:  # torch raises several types
        raise CheckpointError(
            f"{folder}: the weights of {source} do not fit config.json ({error}). The two files are of different "
            "models."
        ) from error
    if record.get("outputs") is not None:
        state_outputs_(model, record["outputs"])
    return model.eval()


def _opened(
    path: Path, kind: kinds.Kind, families: Mapping[str, Family]
) -> tuple[dict[str, Any], Any, dict[str, Tensor]]:
    """Reads and checks a saved model's record (its JSON description) and weights, and returns them with its family.

    The record must be valid for `kind`.

    Raises:
        CheckpointError: A file was damaged or edited, or the record names an unknown family.
    """
    record = read_json(path, MOST_BYTES)
    check_schema(record, KIND, SCHEMA, path)
    check_seal(record, path)
    written, record = record, converted(record, path)
    validated(record, kind, path)
    if record["family"] not in families:
        raise CheckpointError(
            f"{path}: the model family {record['family']!r:.100}: {nearest(record['family'], families)}"
        )
    source = path.with_name("model.safetensors")
    tensors = read_tensors(source, record["weights_sha256"])
    require_finite_tensors(tensors, str(source))
    return record, families[record["family"]], converted_names(written, tensors)


def _load_stock(folder: Path, families: Mapping[str, Family]) -> nn.Module:
    """Loads a portable model from a folder. The model's library creates it, and the weights have the library's names.

    Raises:
        CheckpointError: A file was damaged or edited, the family is unknown, or the weights do not fit.
    """
    path = folder / STOCK
    record, family, tensors = _opened(path, STOCK_RECORD, families)
    # The depth is checked before anything is built. As every layer has several tensors, it cannot exceed their number.
    arguments = record["model"].get("arguments")
    inside = arguments.get("vision_config") if isinstance(arguments, Mapping) else None
    stated = [each for each in (arguments, inside) if isinstance(each, Mapping)]
    depths = [each[name] for each in stated for name in STOCK_DEPTHS if name in each]
    if any(not isinstance(depth, int) or depth > len(tensors) for depth in depths):
        raise CheckpointError(f"{path} describes {depths[0]} layers, and model.safetensors holds fewer.")
    try:
        return family.recreated(record["model"], tensors, record.get("outputs")).eval()
    except Exception as error:  # timm, transformers and torch raise errors of many types
        raise CheckpointError(f"{folder}: the model of {STOCK} cannot be built: {error}") from error


def read_weight_file(path: Path) -> dict[str, Tensor]:
    """Reads another library's safetensors file or torch checkpoint, without running any code in the file.

    If a checkpoint contains more than weights, the state dict is read from the first key in STATE_KEYS that exists.
    Prefixes that DistributedDataParallel or torch.compile added to weight names are removed.

    Raises:
        CheckpointError: The file is missing or damaged, or contains values that are not tensors.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is not a file with weights.")
    if path.suffix == ".safetensors":
        state: Any = read_tensors(path)
    else:
        state = open_pickle(path)
        key = next((key for key in STATE_KEYS if isinstance(state, Mapping) and state.get(key) is not None), None)
        state = state if key is None else state[key]
    if not isinstance(state, Mapping) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise CheckpointError(f"{path} holds values that are not tensors, so it is not a file with weights.")
    return {re.sub(r"^((module|_orig_mod)\.)+", "", name): tensor for name, tensor in state.items()}


def _require_depth(model: Mapping[str, Any], tensors: Mapping[str, Tensor], path: Path) -> None:
    """Raises CheckpointError if config.json and the weights have different numbers of layers."""
    # Without this check, an inconsistent file could make attnrx build any number of layers before its weights fail.
    layers, arguments = model.get("attention"), model.get("arguments")
    layers = layers.get("tuple") if isinstance(layers, Mapping) else layers
    # Every layer has one output projection, whatever its form and rank.
    stored = sum(name.endswith("attention.output.weight") for name in tensors)
    depths = {"attention": len(layers) if isinstance(layers, list) else described(layers)}
    if isinstance(arguments, Mapping):
        depths |= {f"arguments.{name}": arguments[name] for name in DEPTHS if name in arguments}
    for name, depth in depths.items():
        if depth != stored:
            raise CheckpointError(
                f"{path}: model.{name} describes {depth} layers, and model.safetensors holds {stored}. The two "
                "files are of different models."
            )
