"""Edited files: every kind of file, with one edit each, is read or refused by an error that names the file."""

import copy
import json
import os
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch

import attnrx as rx
from attnrx.exporting import load_exported
from attnrx.nouns.elastic import Elastic, Size
from attnrx.nouns.plan import Plan, PredictedQuantity
from attnrx.support.errors import AttnrxError, CheckpointError
from attnrx.support.seals import SEAL, sealed
from attnrx.support.storage import read_json, read_tensors, read_tensors_of, write_with_tensors
from support import tiny_runs
from support.comparisons import pixels
from support.exported_files import planted
from support.planned import CONFIG, original

# Values of every type and size that JSON has.
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 10**6, 2**31, 2**63, 10**30, -(2**63), 0.5, -0.5, 1e-300, 1e300, 1.0, "", "a",
    "../a", "/etc/passwd", "\ud800", "a\udfff", "\x00", "x" * 10_000, "%s{0}", "=1+1", "<script>", [], [[]], [None],
    [1, 2, 3], ["a"], [[]] * 50, {}, {"a": 1}, {"type": "int"}, {"tuple": []}, {"type": []}, {"": None},
)  # fmt: skip
EDITS = 32  # per kind of file


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values in a record, at most two of every list."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, part in items:
        yield from places(part, (*path, key))


def edited(record: Any, number: int) -> tuple[Any, str]:
    """One edit of a record, chosen by its number: a value is replaced, deleted, doubled or added."""
    draw = random.Random(number)
    changed = copy.deepcopy(record)
    *parents, last = draw.choice([path for path in places(record) if path])
    inside = changed
    for key in parents:
        inside = inside[key]
    action = draw.choice(("replace", "replace", "replace", "delete", "double", "add"))
    if action == "delete":
        del inside[last]
    elif action == "double" and isinstance(inside, list):
        inside.insert(0, copy.deepcopy(inside[last]))
    elif action == "add" and isinstance(inside, dict):
        inside[draw.choice(("colour", "type", "", "kind"))] = draw.choice(VALUES)
    else:
        action, inside[last] = "replace", draw.choice(VALUES)
    return changed, f"{action} {'.'.join(map(str, (*parents, last)))}"


def sealed_again(record: Any) -> Any:
    """As somebody who knows the seal would write it."""
    return sealed({key: value for key, value in record.items() if key != SEAL}) if isinstance(record, dict) else record


KINDS: dict[str, Callable[[Path], Any]] = {
    "prescription.json": rx.Prescription.load,
    "diagnosis.json": rx.Diagnosis.load,
    "evidence.json": rx.Evidence.load,
    "plan/plan.json": Plan.load,
    "elastic/elastic.json": lambda path: rx.load(path.parent, macs=0.9),
    "model/config.json": lambda path: rx.load(path.parent),
    "model.onnx.json": lambda path: load_exported(path.with_name("model.onnx")),
    "run/training.json": lambda path: tiny_runs.run(path.parent),
    "stopped/checkpoints/step-00000004/state.json": lambda path: tiny_runs.run(path.parents[2], log=ending),
}


class Resumed(BaseException):
    """Ends a run that has read its checkpoint."""


def ending(line: str) -> None:
    raise Resumed


@pytest.fixture(autouse=True)
def as_for_a_user() -> Iterator[None]:
    """No type checks of arguments, which users do not have either."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("files")
    model = original()
    diagnosis = rx.diagnose(model, pixels(CONFIG, 8), batch_size=8)
    diagnosis.save(root / "diagnosis.json")
    prescription = rx.prescribe(diagnosis, "qk=total_rank:0.5 vo=total_rank:0.5 tokens=ward:0.5@2")
    prescription.save(root / "prescription.json")
    small = rx.realize(model, prescription)
    evidence = rx.verify(small, model, pixels(CONFIG, 8), [rx.checks.Costs(), rx.checks.Fidelity()])
    evidence.save(root / "evidence.json")
    expected = {name: PredictedQuantity(0.1, 0.1, 8) for name in ("divergence", "agreement")}
    Plan(prescription, "macs=0.7x", "macs", 0.7, expected, ()).save(root / "plan")
    costs = [rx.models.family_of(each).costs(each) for each in (model, small)]
    shares = [(each.macs / costs[0].macs, each.params / costs[0].params) for each in costs]
    for name, each in (("original", model), ("macs-0.5", small)):
        rx.save(each, root / "elastic" / name)
    named = zip(("original", "macs-0.5"), shares, (model, small), strict=True)
    sizes = tuple(Size(name, *share, rx.models.model_fingerprint(each)) for name, share, each in named)
    Elastic(root / "elastic", sizes, {"macs": costs[0].macs, "params": costs[0].params}).write()
    rx.save(small, root / "model")
    planted(root, "onnx")
    tiny_runs.run(root / "run")
    with pytest.raises(SystemExit):
        tiny_runs.run(root / "stopped", tiny_runs.at(5, sys.exit))
    return root


@pytest.mark.parametrize("kind", KINDS)
def test_an_edited_file_is_read_or_refused(kind: str, files: Path) -> None:
    path = files / kind
    before = path.read_text()
    record = json.loads(before)
    refused = 0
    try:
        for number in range(EDITS):
            changed, edit = edited(record, number)
            text = json.dumps(sealed_again(changed) if kind == "model/config.json" else changed)
            path.write_text(text)
            try:
                KINDS[kind](path)
            except AttnrxError as error:
                refused += 1
                folder = path.parents[2] if path.name == "state.json" else path.parent  # of the run
                assert path.name in str(error) or str(folder) in str(error), (edit, error)
            except Resumed:
                continue
            except Exception as error:
                raise AssertionError(f"{kind}: {edit} (number {number}): {error!r}") from error
    finally:
        path.write_text(before)
    assert refused, "no edit was found"


@pytest.mark.parametrize("kind", [*KINDS, "any.json"])
def test_a_pipe_is_refused_in_place_of_a_file(kind: str, files: Path, tmp_path: Path) -> None:
    name = Path(kind).name
    if kind in ("model.onnx.json", "elastic/elastic.json") or name == "state.json":
        return  # without a regular file of this name, a path is no export, and a folder no elastic model or run
    os.mkfifo(tmp_path / name)
    with pytest.raises(AttnrxError, match="is a pipe"):
        KINDS.get(kind, read_json)(tmp_path / name)


@pytest.mark.parametrize("kind", ["prescription.json", "diagnosis.json"])
@pytest.mark.parametrize("name", ["x", "layers.7.hidden.weight"])
def test_a_tensor_that_nothing_refers_to_is_refused(kind: str, name: str, files: Path, tmp_path: Path) -> None:
    record, path = read_json(files / kind), tmp_path / kind
    tensors = {**read_tensors_of(files / kind, record), name: torch.zeros(2)}
    # With the right hash, as somebody who knows the format would write it.
    write_with_tensors(path, {key: value for key, value in record.items() if key != "tensors_sha256"}, tensors)
    with pytest.raises(CheckpointError, match=re.escape(str(path))):
        KINDS[kind](path)


@pytest.mark.parametrize("text", ['{"a": "\\ud800"}', '{"\\uDFFF": 1}', '["a\\udbffb"]'])
def test_half_a_character_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"a\.json"):
        read_json(tmp_path / "a.json")
    (tmp_path / "a.json").write_text('{"a": "\\ud83d\\ude00"}')  # both halves
    assert read_json(tmp_path / "a.json") == {"a": "\U0001f600"}


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2])
def test_tensors_of_unusual_types_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(2, dtype=torch.float32), "b": torch.zeros(2).to(dtype)}, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=r"a\.safetensors: the tensor 'b' is"):
        read_tensors(tmp_path / "a.safetensors")
