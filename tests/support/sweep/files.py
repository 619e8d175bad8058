"""Damaged files of every kind that attnrx reads: refused by their name, or read as they were."""

import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import attnrx as rx
from attnrx.exporting import load_exported
from attnrx.nouns.plan import Plan
from support import tiny_runs
from support.sweep.case import Case, finite
from support.sweep.draws import generator, shuffled
from support.sweep.records import kinds
from support.sweep.workshop import SIZE, WORKSHOP

Damage = Callable[[Path, bytes], None]


def _content(change: Callable[[bytes], bytes]) -> Damage:
    return lambda path, content: _write(path, change(content))


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _as_folder(path: Path, content: bytes) -> None:
    path.unlink()
    path.mkdir()


def _as_link(target: str) -> Damage:
    def damage(path: Path, content: bytes) -> None:
        path.unlink()
        path.symlink_to(target.format(name=path.name))

    return damage


def _as_pipe(path: Path, content: bytes) -> None:
    import os

    path.unlink()
    os.mkfifo(path)


def _flipped(content: bytes, position: int) -> bytes:
    position %= max(len(content), 1)
    return content[:position] + bytes([content[position] ^ 0x5A]) + content[position + 1 :] if content else b""


ANY: dict[str, Damage] = {
    "empty": _content(lambda content: b""),
    "one byte": _content(lambda content: content[:1]),
    "a quarter": _content(lambda content: content[: len(content) // 4]),
    "half": _content(lambda content: content[: len(content) // 2]),
    "without its last byte": _content(lambda content: content[:-1]),
    "with a byte more": _content(lambda content: content + b"x"),
    "a byte before it": _content(lambda content: b"x" + content),
    "twice": _content(lambda content: content * 2),
    "a flipped byte at its start": _content(lambda content: _flipped(content, 3)),
    "a flipped byte inside": _content(lambda content: _flipped(content, len(content) // 3)),
    "a flipped byte at its end": _content(lambda content: _flipped(content, len(content) - 2)),
    "zeros": _content(lambda content: bytes(len(content))),
    "text": _content(lambda content: b"hello\n"),
    "an archive": _content(lambda content: b"PK\x03\x04" + content),
    "a pickle": _content(lambda content: b"\x80\x04\x95" + content[:50]),
    "a folder": _as_folder,
    "a loop of links": _as_link("{name}"),
    "a link to nothing": _as_link("missing"),
    "a link to a device": _as_link("/dev/zero"),
    "a pipe": _as_pipe,
    "gone": lambda path, content: path.unlink(),
}
TEXT: dict[str, Damage] = {
    "with a byte order mark": _content(lambda content: b"\xef\xbb\xbf" + content),
    "in UTF-16": _content(lambda content: content.decode().encode("utf-16")),
    "in Latin-1": _content(lambda content: content.replace(b"a", b"\xe4", 1)),
    "with returns": _content(lambda content: content.replace(b"\n", b"\r\n")),
    "with a comment": _content(lambda content: b"// a comment\n" + content),
    "with a comma at its end": _content(lambda content: content.rstrip()[:-1] + b",}"),
    "a list": _content(lambda content: b"[" + content + b"]"),
    "a number": _content(lambda content: b"1" * 5000),
    "null": _content(lambda content: b"null"),
    "deep": _content(lambda content: b'{"a":' * 100_000),
    "an object of another kind": _content(lambda content: b'{"kind": "attnrx evidence", "schema": 1}'),
    "an empty object": _content(lambda content: b"{}"),
}


def _header(change: Callable[[dict[str, Any]], Any]) -> Damage:
    """Damages the JSON header of safetensors."""

    def changed(content: bytes) -> bytes:
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        text = json.dumps(change(header)).encode()
        return struct.pack("<Q", len(text)) + text + content[8 + length :]

    return _content(changed)


def _first(change: Callable[[dict[str, Any]], Any]) -> Damage:
    def changed(header: dict[str, Any]) -> dict[str, Any]:
        name = next(each for each in sorted(header) if each != "__metadata__")
        return {**header, name: change(header[name])}

    return _header(changed)


def _tensors(change: Callable[[torch.Tensor], torch.Tensor | None]) -> Damage:
    """Changes the first matrix of safetensors, in a valid file."""

    def damage(path: Path, content: bytes) -> None:
        tensors = load_file(path)
        name = next(each for each in sorted(tensors) if tensors[each].ndim == 2)
        changed = change(tensors.pop(name))
        save_file(tensors if changed is None else {**tensors, name: changed.contiguous()}, path)

    return damage


SAFETENSORS: dict[str, Damage] = {
    "a huge header": _content(lambda content: struct.pack("<Q", 2**62) + content[8:]),
    "no header": _content(lambda content: struct.pack("<Q", 0) + content[8:]),
    "a short header": _content(lambda content: struct.pack("<Q", 10) + content[8:]),
    "an unknown type": _first(lambda entry: {**entry, "dtype": "F7"}),
    "another type": _first(lambda entry: {**entry, "dtype": "F64"}),
    "complex numbers": _first(lambda entry: {**entry, "dtype": "C64"}),
    "a negative shape": _first(lambda entry: {**entry, "shape": [-1, 2]}),
    "a huge shape": _first(lambda entry: {**entry, "shape": [2**40, 2**40]}),
    "offsets beyond the end": _first(lambda entry: {**entry, "data_offsets": [0, 2**50]}),
    "offsets the wrong way": _first(lambda entry: {**entry, "data_offsets": entry["data_offsets"][::-1]}),
    "an entry of text": _first(lambda entry: "text"),
    "an entry without a shape": _first(lambda entry: {"dtype": entry["dtype"]}),
    "a header of a list": _header(lambda header: [header]),
    "metadata of numbers": _header(lambda header: {**header, "__metadata__": {"kind": 3}}),
    "metadata of another kind": _header(lambda header: {**header, "__metadata__": {"kind": "attnrx evidence"}}),
    "NaN": _tensors(lambda tensor: tensor * float("nan")),
    "infinity": _tensors(lambda tensor: tensor + float("inf")),
    "a transposed tensor": _tensors(lambda tensor: torch.cat([tensor.mT, tensor.mT])),
    "an empty tensor": _tensors(lambda tensor: tensor[:0]),
    "float8": _tensors(lambda tensor: tensor.to(torch.float8_e4m3fn)),
    "integers": _tensors(lambda tensor: tensor.to(torch.int32)),
    "half precision": _tensors(lambda tensor: tensor.half()),
    "a tensor less": _tensors(lambda tensor: None),
}  # fmt: skip


@dataclass(frozen=True)
class Read:
    """Files that are read together: the folder to copy, the files that are damaged, and what reads them."""

    folder: Callable[[], Path]
    pattern: str
    use: Callable[[Path], Any]


def _with_weights(folder: Path) -> Any:
    """A model with its weights from a file of their own."""
    model = rx.load(WORKSHOP.original_folder, weights=folder / "model.safetensors")
    return model(WORKSHOP.images[:2])


def _read(name: str) -> Callable[[Path], Any]:
    """Reads a folder as the cases of records do."""
    kind = kinds()[name]
    return lambda folder: kind.use(folder / kind.path)


@cache
def readers() -> dict[str, Read]:
    made = WORKSHOP
    return {
        "diagnosis": Read(lambda: made.diagnosis_file.parent, "*", _read("diagnosis")),
        "prescription": Read(lambda: made.prescription_file.parent, "*", _read("prescription")),
        "evidence": Read(lambda: made.evidence_file.parent, "*", _read("evidence")),
        "plan": Read(lambda: made.plan_file.parent, "*", lambda folder: Plan.load(folder / "plan.json")),
        "own model": Read(lambda: made.own_folder, "[cm]*.*[ns]", _read("own model")),
        "timm model": Read(lambda: made.timm_folder, "[cm]*.*[ns]", _read("timm model")),
        "portable model": Read(lambda: made.portable_folder, "[acm]*.*[ns]", _read("portable model")),
        "elastic": Read(lambda: made.elastic_folder, "**/*.*[ns]", _read("elastic")),
        "weights": Read(lambda: made.original_folder, "*.safetensors", _with_weights),
        "export": Read(lambda: made.export_file.parent, "*", _read("export")),
        "exported file": Read(
            lambda: made.export_file.parent, "*", lambda folder: load_exported(folder / "model.onnx")(made.images[:2])
        ),
        "run": Read(lambda: made.run_folder, "*.json*", lambda folder: tiny_runs.run(folder)),
        "checkpoint": Read(lambda: made.stopped_folder, "checkpoints/*/*", _read("checkpoint")),
        "images": Read(lambda: made.data_folder, "train/cat/00[01].png", _images),
        "table": Read(lambda: _table(), "*.parquet", _images),
        "class map": Read(lambda: kinds()["class map"].folder(), "*", _read("class map")),
        "report": Read(lambda: made.report_file.parent, "*", _rewritten),
        "card": Read(lambda: made.own_folder, "*.md", _saved_again),
    }


def _images(folder: Path) -> Any:
    path = next(iter(sorted(folder.glob("*.parquet"))), folder)
    splits = rx.load_data(path, image_size=SIZE)
    return [batch.images for part in (splits.train, splits.validation, splits.test) for batch in part.batches(8)]


def _table() -> Path:
    from support.pictures import rows, write_parquet

    folder = WORKSHOP.root / "table"
    if not folder.exists():
        write_parquet(
            folder / "a.parquet", [each for name in ("train", "validation", "test") for each in rows(12, name)]
        )
    return folder


def _rewritten(folder: Path) -> Any:
    """A report in the place of what is there."""
    return rx.write_report(folder / "report.html", evidence=WORKSHOP.evidence).stat().st_size


def _saved_again(folder: Path) -> Any:
    return rx.load(rx.save(WORKSHOP.slim, folder))(WORKSHOP.images[:2])


@cache
def slots() -> tuple[tuple[str, str, str], ...]:
    """Every reader, file and damage, in a fixed random order; the readers take turns."""
    by_reader = []
    for name, reader in readers().items():
        every = []
        for path in sorted(reader.folder().glob(reader.pattern)):
            more = SAFETENSORS if path.suffix == ".safetensors" else TEXT if path.suffix == ".json" else {}
            every += [(name, str(path.relative_to(reader.folder())), damage) for damage in {**ANY, **more}]
        by_reader.append(shuffled(every, name))
    longest = max(map(len, by_reader))
    return tuple(every[turn] for turn in range(longest) for every in by_reader if turn < len(every))


def draw(number: int, folder: Path) -> Case:
    name, relative, damage = slots()[number]
    reader, place = readers()[name], folder / "files"
    shutil.copytree(reader.folder(), place)
    path = place / relative
    {**ANY, **TEXT, **SAFETENSORS}[damage](path, path.read_bytes())
    generator("files", number)
    return Case(f"{name}: {relative} is {damage}", lambda: reader.use(place), finite, (path.name, str(place)))
