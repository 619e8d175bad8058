"""A process that is killed at any file-system event leaves the old result or the new one, whole, and nothing else
changed.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import attnrx as rx
from attnrx.data import three_parts
from attnrx.data.model_data import splits_for
from attnrx.decide.planning import Target
from attnrx.exporting import present_exports
from attnrx.nouns.prescription import TokenPrescription
from attnrx.support import atomic_writes
from attnrx.workflows.shrunk import Shrunk
from attnrx_lab.vision_transformer import ViTConfig
from support.cases import model
from support.command_line import call
from support.interruptions import snapshots, visible, watched
from support.pictures import write_folder
from support.tiny_runs import run as train_tiny

CONFIG = ViTConfig.uniform(
    "svda", width=12, depth=2, heads=3, image_size=16, patch_size=8, channels=3, classes=3, mlp_ratio=2.0
)
PIXELS = torch.randn(24, 3, 16, 16, dtype=torch.float32)
TOKENS = "dynamicvit:0.5@2"  # its predictors are tensors beside the prescription


def command(*words: object) -> None:
    done = call(*words)
    assert done.code in (0, 1), done.err


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Two models, their diagnoses and prescriptions, and images."""
    root = tmp_path_factory.mktemp("inputs")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        data = write_folder(root / "images", {"train": 8, "validation": 2, "test": 4}, size=(16, 16))
        models = [rx.save(model(CONFIG, seed).float(), root / f"model{seed}") for seed in (0, 1)]
        diagnoses, prescriptions = [], []
        for number, folder in enumerate(models):
            diagnoses.append(root / f"diagnosis{number}.json")
            command("diagnose", folder, "--data", data, "--out", diagnoses[-1])
            prescriptions.append(root / f"prescription{number}.json")
            command("prescribe", diagnoses[-1], "--rules", "qk=top_rank:2", "--out", prescriptions[-1])
    finally:
        torch.set_default_dtype(before)
    return SimpleNamespace(root=root, data=data, models=models, diagnoses=diagnoses, prescriptions=prescriptions)


@dataclass(frozen=True)
class Verb:
    """A command that writes to `out`: the first and the second of two results, and how one is read."""

    write: Callable[[SimpleNamespace, Path, int], object]
    read: Callable[[Path], Any]
    out: str
    again: Callable[[SimpleNamespace, Path], object] | None = None


def saved(inputs: SimpleNamespace, out: Path, number: int) -> None:
    loaded = rx.load(inputs.models[number])
    prescription = rx.Prescription.load(inputs.prescriptions[number])
    fresh = rx.prescribe(loaded, {"tokens": TokenPrescription(rx.tokens.parse_policy(TOKENS), seed=number)})
    reduction = rx.models.reduction_of(rx.realize(loaded, fresh))
    assert reduction is not None
    tokens = TokenPrescription(reduction.policy, reduction.stages.state_dict())
    prescription = replace(rx.Prescription.load(inputs.prescriptions[number]), tokens=tokens)
    evidence = rx.Evidence((), {"candidate": rx.models.model_fingerprint(loaded), "number": number})
    rx.save(loaded, out, prescription=prescription, evidence=evidence)


def realized(inputs: SimpleNamespace, out: Path, number: int) -> None:
    command("realize", inputs.models[number], "--prescription", inputs.prescriptions[number], "--out", out)


def trained(inputs: SimpleNamespace, out: Path, number: int) -> None:
    if number:
        train_tiny(out)
    else:
        saved(inputs, out, 1)


def model_files(out: Path) -> dict[str, bytes]:
    """What belongs to a model; a training adds its history and checkpoints before its model is finished."""
    rx.load(out)
    files = visible(out)
    return {name: files[name] for name in files if not name.startswith(("checkpoints/", "history"))}


def whole_model(out: Path) -> dict[str, bytes]:
    rx.load(out)
    if (out / "prescription.json").exists():
        rx.Prescription.load(out / "prescription.json")
    return visible(out)


def diagnosed(inputs: SimpleNamespace, out: Path, number: int) -> None:
    command("diagnose", inputs.models[number], "--data", inputs.data, "--out", out)


def diagnosis(out: Path) -> Any:
    found = rx.Diagnosis.load(out)
    return found.fingerprint, [layer.spectrum.query.sum().item() for layer in found.layers]


def exported(inputs: SimpleNamespace, out: Path, number: int) -> None:
    command("export", inputs.models[number], "--to", "program", "--batch", 1 + number, "--out", out)


def export_facts(out: Path) -> Any:
    found = rx.exporting.load_exported(out, trust=True)
    return {name: value for name, value in found.facts.items() if name != "parity"}


@cache
def shrunk(number: int) -> Shrunk:
    """A smaller model as `shrink` returns it, without a plan."""
    original = model(CONFIG).float()
    prescription = rx.prescribe(rx.diagnose(original, PIXELS, moments=True), f"vo=uniform_rank:{2 + number}")
    small = rx.realize(original, prescription)
    evidence = rx.verify(small, original, PIXELS, [rx.checks.Costs()], prescription=prescription)
    parts = three_parts(splits_for(original, PIXELS))
    return Shrunk(small, prescription, evidence, None, Target("macs", 0.9), images=parts)


def results_saved(inputs: SimpleNamespace, out: Path, number: int) -> None:
    """The first result has files that the second one lacks, and the other way round."""
    found = shrunk(number)
    settings = {"original": model(CONFIG).float(), "batch": 2, "threads": 1}
    to = "program" if number else "onnx"
    found.save(out, onnx=not number, to=to, **settings)


def whole_result(out: Path) -> dict[str, bytes]:
    """Every file of the folder belongs to its model."""
    fingerprint = rx.models.model_fingerprint(rx.load(out))
    assert rx.Evidence.load(out / "evidence.json").about["candidate"] == fingerprint
    exports = present_exports(out)
    assert {facts["model"]["fingerprint"] for facts in exports.values()} <= {fingerprint}
    files = visible(out)
    known = {"config.json", "model.safetensors", "prescription.json", "evidence.json", "README.md", "report.html"}
    known |= {name for path, facts in exports.items() for name in (*facts["files"], f"{path.name}.json")}
    known |= {path.name for path in out.glob("prescription.json.tensors-*")}
    known |= {f"run_{path.stem}.py" for path in exports if path.suffix == ".onnx"}
    known |= {f"evidence{path.stem.removeprefix('model') or '-onnx'}.json" for path in exports}
    assert set(files) <= known | {"notes.txt", "kept/weights.safetensors"} and known <= set(files)
    return files


def saved_again(inputs: SimpleNamespace, out: Path) -> None:
    shrunk(0).save(out, onnx=False)
    whole_result(out)


VERBS = {
    "shrink": Verb(results_saved, whole_result, "model", saved_again),
    "save": Verb(saved, whole_model, "model"),
    "realize": Verb(realized, whole_model, "model"),
    "train": Verb(trained, model_files, "model"),
    "export": Verb(exported, export_facts, "model.pt2"),
    "diagnose": Verb(diagnosed, diagnosis, "diagnosis.json"),
}


@pytest.mark.parametrize("name", VERBS)
@pytest.mark.slow
def test_a_kill_at_any_file_system_event_leaves_the_old_or_the_new_result(
    inputs: SimpleNamespace, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    verb, root = VERBS[name], tmp_path / "root"
    out = root / verb.out
    root.mkdir()
    verb.write(inputs, out, 0)
    if out.is_dir():
        (out / "notes.txt").write_text("of the user")
        (out / "kept").mkdir()
        (out / "kept" / "weights.safetensors").write_bytes(b"of the user")
    (root / "model.safetensors").write_bytes(b"of the user")
    unrelated = {path: content for path, content in visible(root).items() if content == b"of the user"}
    old = verb.read(out)

    watch, copies = snapshots(root, lambda: verb.write(inputs, out, 1), tmp_path / "copies")
    new = verb.read(out)
    assert old != new and len(copies) > 3
    for event, copy in zip([*watch.events, "the end"], copies, strict=True):
        assert verb.read(copy / verb.out) in (old, new), f"killed before {event}"
        files = visible(copy)
        assert all(files.get(path) == content for path, content in unrelated.items()), event
    assert verb.read(copies[0] / verb.out) == old and verb.read(copies[-1] / verb.out) == new
    temporary = (".partial", ".lock")
    hidden = [path for path in watch.written if not any(part.endswith(temporary) for part in path.parts)]
    assert not hidden, "opened for writing under its final name: a kill could leave half of it"
    assert not list(root.rglob("*.partial")) and not list(root.rglob("*.lock"))
    # Whatever a killed process leaves, the next one writes its result and deletes the rest.
    monkeypatch.setattr(atomic_writes, "process_runs", lambda number: False)
    if verb.again is not None:
        for event, copy in zip([*watch.events, "the end"], copies, strict=True):
            verb.again(inputs, copy / verb.out)
            assert not list(copy.glob(".*")), event
    shutil.rmtree(tmp_path / "copies")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.slow
def test_processes_that_end_within_a_save_leave_one_of_two_models_and_the_next_save_deletes_their_files(
    inputs: SimpleNamespace, tmp_path: Path
) -> None:
    out = tmp_path / "root" / "model"
    saved(inputs, out, 0)
    old, number, ended = visible(out), 0, True
    while ended:  # at the first event, the second ... until there are no more
        number += 1
        child = os.fork()
        if child == 0:
            try:
                watched(
                    tmp_path / "root",
                    lambda: saved(inputs, out, 1),
                    lambda event, at=number: event == at and os._exit(9),
                )
            finally:
                os._exit(0)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        found = whole_model(out)
        if found != old:
            saved(inputs, out, 0)
            assert whole_model(out) == old
        assert len(list(out.parent.glob(".*.partial"))) <= 1
    assert number > 10 and not list(out.parent.glob(".*"))
