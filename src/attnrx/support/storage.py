"""Writes JSON and safetensors files atomically, and validates them when they are loaded.

Every file names its kind, e.g. "attnrx diagnosis". A JSON file stores the kind in the field `kind`, and a safetensors
file stores it in its header.
"""

import glob
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as decode_tensors
from safetensors.torch import save as encode_tensors

from attnrx.support.arguments import ANY_TEXT, FINITE, Kind, checked, described
from attnrx.support.atomic_writes import require_replaceable, write_atomically
from attnrx.support.earlier_versions import converted
from attnrx.support.errors import CheckpointError, FingerprintMismatch, InvalidInput
from attnrx.support.records import DEEPEST_JSON, nesting, require_regular, validated
from attnrx.support.seals import finite_json
from attnrx.support.shapes import Tensor

Part = TypeVar("Part")

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
# The allowed dtypes of tensors in files. Others are rejected, because torch has few operations for e.g. float8.
DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool, torch.uint8),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
)
MAX_JSON_BYTES = 2**28  # parsed JSON takes several times the memory of its text


@checked(content=ANY_TEXT)
def write_text(path: Path | str, content: str) -> Path:
    """Writes a text as UTF-8 with `write_atomically`, and returns the path."""
    return write_atomically(path, lambda temporary: temporary.write_bytes(content.encode()))


@checked()
def write_json(path: Path | str, record: Mapping[str, Any] | list[Any]) -> Path:
    """Atomically writes a record to a JSON file (see `json_text`), and returns the path."""
    return write_text(path, json_text(record))


def json_text(record: Mapping[str, Any] | list[Any]) -> str:
    """Returns a record as indented JSON. NaN and infinity become null, because JSON cannot represent them."""
    return json.dumps(finite_json(record), indent=2, allow_nan=False) + "\n"


@checked()
def read_json(path: Path | str, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Reads a JSON file.

    Raises:
        CheckpointError: The file is missing, is not a regular file, is larger than `max_bytes`, is nested too deeply,
            or is not valid JSON.
    """
    path = require_regular(path)
    size = path.stat().st_size
    if size > max_bytes:  # checked before the file is read, so that a wrong file cannot exhaust the memory
        raise CheckpointError(f"{path} has {size:,} bytes; a file of its kind has at most {max_bytes:,}.")
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors on Windows write a byte order mark at the start
        value = json.loads(text, object_pairs_hook=_object)
        # A lone surrogate is half of a character, which could not be printed or saved again. It raises an error here.
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
        if nesting(value) > DEEPEST_JSON:
            raise ValueError(f"it nests {nesting(value)} deep; JSON files nest at most {DEEPEST_JSON} deep")
    except (OSError, ValueError, RecursionError) as error:  # ValueError: not UTF-8, not JSON, or over 4,300 digits
        raise CheckpointError(
            f"{path} is not readable JSON ({error}); it was truncated or edited. Make it again."
        ) from error
    return validated(value, FINITE, path)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Converts a JSON object to a dict. Raises ValueError if a name occurs twice, because its value is then unclear."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has the name {described(twice)} twice")
    return found


@checked()
def write_tensors(path: Path | str, tensors: Mapping[str, Tensor], about: Mapping[str, str] | None = None) -> Path:
    """Atomically writes tensors to a safetensors file, with `about` as metadata, and returns the path."""
    content = _encoded(tensors, dict(about or {}))
    return write_atomically(path, lambda temporary: temporary.write_bytes(content))


def _encoded(tensors: Mapping[str, Tensor], about: dict[str, str]) -> bytes:
    written = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    # safetensors cannot store the same memory under two names. If two tensors share memory, one of them is cloned.
    first = {tensor.data_ptr(): name for name, tensor in reversed(written.items())}
    is_first = {name: first[tensor.data_ptr()] == name or not tensor.numel() for name, tensor in written.items()}
    return encode_tensors({name: each if is_first[name] else each.clone() for name, each in written.items()}, about)


@checked()
def read_tensors(path: Path | str, sha256: str | None = None) -> dict[str, Tensor]:
    """Loads the tensors of a safetensors file. If you pass `sha256`, the file must have this hash.

    Raises:
        CheckpointError: The file is missing or damaged, has another hash, or contains a dtype that is not supported.
    """
    path = require_regular(path)
    try:
        # The file is read once, so that hash and tensors come from the same bytes even if it is replaced meanwhile.
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}.") from error
    if sha256 is not None and hashlib.sha256(content).hexdigest() != sha256:
        raise CheckpointError(
            f"{path} is not the file that was saved (its sha256 differs): it was truncated or tampered with."
        )
    try:
        tensors = decode_tensors(content)
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:  # KeyError for unknown dtypes
        raise CheckpointError(
            f"{path} is not a whole safetensors file ({error}); it was truncated or damaged."
        ) from error
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise CheckpointError(
                f"{path}: the tensor {name!r} is {str(tensor.dtype).removeprefix('torch.')}; it must be of real "
                "numbers of 16 bits or more, integers or booleans."
            )
    return tensors


def write_with_tensors(path: Path | str, record: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """Writes a record as JSON, and its tensors as safetensors in the same folder. Returns the path of the JSON file.

    The JSON file refers to the tensors by their hash. The name of the tensors' file contains the name of the JSON file
    and the hash, so different tensors never overwrite each other. The tensors are written first. The JSON file that
    refers to them then replaces the previous JSON file in one atomic step. Finally, the previous tensors are deleted.

    Raises:
        InvalidInput: A file with this name exists, and attnrx did not write it.
        CheckpointError: A file cannot be written.
    """
    path, kind = Path(path), f"{record['kind']} tensors"
    require_replaceable(path)
    versions = path.parent.glob(f"{glob.escape(path.name)}.tensors-*.safetensors")
    # Only files of this kind are replaced or deleted, because other files with a matching name belong to the user.
    earlier = [each for each in versions if file_kind(each) == kind]
    if tensors:
        content = _encoded(tensors, {"kind": kind})
        sha256 = hashlib.sha256(content).hexdigest()
        file = _tensors_path(path, sha256)
        if file.exists() and file not in earlier:
            raise InvalidInput(f"{file} would be overwritten, and attnrx did not write it: move it away.")
        # The file is written even if it exists with the same hash in its name, because it may be damaged.
        write_atomically(file, lambda temporary: temporary.write_bytes(content))
        record = {**record, "tensors_sha256": sha256}
        earlier = [each for each in earlier if each != file]
    write_json(path, record)  # before the deletion, so that even a killed process leaves a JSON file with its tensors
    for each in earlier:
        each.unlink(missing_ok=True)
    return path


def read_tensors_of(path: Path | str, record: Mapping[str, Any]) -> dict[str, Tensor]:
    """Loads the tensors that `write_with_tensors` wrote with a record. Without such tensors, the result is empty.

    Raises:
        CheckpointError: The tensors are missing or damaged, or their hash differs from the hash in the record.
    """
    sha256 = record.get("tensors_sha256")
    if sha256 is None:
        return {}
    if not isinstance(sha256, str) or not re.fullmatch("[0-9a-f]{64}", sha256):
        raise CheckpointError(f"{path}: tensors_sha256 is {sha256!r} and not a sha256; the file was edited.")
    file = _tensors_path(path, sha256)
    if not file.exists():
        raise CheckpointError(f"{path} needs {file.name}, which is not in its folder; move or copy both together.")
    return read_tensors(file, sha256)


def tensors_below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors whose names begin with `prefix`, e.g. "layers.3.", keyed by the rest of their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def layer_tensors(layers: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Returns the tensors of all layers in one dict. The tensor NAME of layer 3 gets the name "layers.3.NAME"."""
    return {f"layers.{index}.{name}": tensor for index, layer in enumerate(layers) for name, tensor in layer.items()}


def _tensors_path(path: Path | str, sha256: str) -> Path:
    path = Path(path)
    return path.with_name(f"{path.name}.tensors-{sha256[:12]}.safetensors")


# The kinds of files that are neither JSON nor safetensors, and the bytes by which `file_kind` recognizes them.
CARD_KIND = "attnrx model card"
REPORT = "attnrx report"  # the kind of an HTML report
_CARD, _PAGE = b"---\nlibrary_name: attnrx\n", b'<meta name="generator" content="attnrx report">'


def file_kind(path: Path | str) -> str | None:
    """Returns the kind of a file that attnrx wrote, e.g. "attnrx report", or None for any other file."""
    path = Path(path)
    if not path.is_file():
        return None
    try:
        with path.open("rb") as handle:
            start = handle.read(1000)
        # The first bytes show the kind of cards, pages and safetensors. JSON is parsed as a whole, because the field
        # `kind` may be anywhere in it.
        if start.startswith(_CARD):
            return CARD_KIND
        if _PAGE in start:
            return REPORT
        if start[8:9] == b"{":  # safetensors begin with eight bytes of length and a JSON object
            with safe_open(path, "pt") as file:
                return (file.metadata() or {}).get("kind")
        record = json.loads(path.read_bytes()) if start.startswith(b"{") else {}
        return str(record["kind"]) if str(record.get("kind")).startswith("attnrx ") else None
    except (OSError, ValueError, RecursionError, SafetensorError):
        return None


def file_sha256(path: Path | str) -> str:
    """Returns the hash of a file in hexadecimal."""
    with Path(path).open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """Returns a 16-digit hash of the tensors' names, shapes, dtypes and values, which identifies a model."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        # The values are hashed as bytes, because NumPy has no bfloat16.
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def require_fingerprint(made_for: str, fingerprint: str, document: str, what: str, advice: str) -> None:
    """Raises FingerprintMismatch if a document belongs to another model.

    Args:
        made_for: The fingerprint of the model to which the document belongs.
        fingerprint: The fingerprint of the model with which you use the document.
        document: The beginning of the error message, e.g. "the diagnosis was made for".
        what: A description of the model with which you use the document.
        advice: The end of the error message, which says what to do.
    """
    if made_for != fingerprint:
        raise FingerprintMismatch(f"{document} the model {made_for}, and {what} is {fingerprint}: {advice}.")


def check_schema(record: object, kind: str, schema: int, path: Path | str) -> None:
    """Raises CheckpointError if the kind or the schema version of a file's record is not the expected one."""
    found = (record.get("kind"), record.get("schema")) if isinstance(record, Mapping) else (None, None)
    if found[0] != kind:
        raise CheckpointError(f"{path} is not an {kind} (its kind is {described(found[0])}).")
    if found[1] != schema:
        raise CheckpointError(
            f"{path} has {kind} schema {described(found[1])}; this version of attnrx reads schema {schema}."
        )


def read_record(path: Path | str, kind: str, schema: int, fields: Kind) -> dict[str, Any]:
    """Loads a JSON file, and checks its kind, its schema version and all other `fields`.

    Raises:
        CheckpointError: The file is missing or damaged, has another kind or version, or contains an invalid field.
    """
    record = read_json(path)
    if isinstance(record, dict) and record.get("kind") == kind:
        record = converted(record, path)
    # The kind and the version are checked first. Otherwise a file of another kind would be reported as damaged.
    check_schema(record, kind, schema, path)
    validated({name: value for name, value in record.items() if name not in ("kind", "schema")}, fields, path)
    return record


def read_with_tensors(
    path: Path | str,
    kind: str,
    schema: int,
    fields: Kind,
    build: Callable[[dict[str, Any], dict[str, Tensor]], Part],
    tensors_of: Callable[[Part], Mapping[str, Tensor]],
) -> Part:
    """Loads a record and tensors that `write_with_tensors` wrote, and returns what `build` creates from them.

    `tensors_of` returns the tensors that the object uses. The file must not contain any other tensors.

    Raises:
        CheckpointError: A file is missing or damaged, or has another kind or version. Also raised if a tensor is
            missing, or if a tensor is not used.
        InvalidInput: A tensor is not finite.
    """
    # Cheap checks come first: kind and version, then every field, and last the hash of the tensors.
    record = read_record(path, kind, schema, fields)
    tensors = read_tensors_of(path, record)
    require_finite_tensors(tensors, str(path))
    try:
        part = build(record, tensors)
    except KeyError as error:
        raise CheckpointError(f"{path} needs the tensor {error}, which is not in its folder; make it again.") from None
    except InvalidInput as error:
        raise CheckpointError(f"the parts of {path} disagree: {error}") from error
    if others := sorted(tensors.keys() - tensors_of(part).keys()):
        raise CheckpointError(
            f"{path}: its tensors include {others[0]!r}, which nothing in the file refers to. The files were edited, "
            "or are of two versions; make them again."
        )
    return part


def require_finite_tensors(tensors: Mapping[str, Tensor], what: str) -> None:
    """Raises InvalidInput with the name of the first tensor that holds NaN or infinity."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise InvalidInput(
                f"{what} holds NaN or infinity in {name!r}; it cannot be used. Take an earlier checkpoint."
            )
