"""What the commands write, and what they never write over: inputs, files of others, and what is not a regular file."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import attnrx as rx
from attnrx.support import atomic_writes
from attnrx.support.errors import CheckpointError, FingerprintMismatch, InvalidInput
from attnrx_lab.vision_transformer import VisionTransformer, ViTConfig, initialize_
from support.command_line import call, record
from support.interruptions import visible
from support.pictures import write_folder

CONFIG = ViTConfig.uniform(
    "dense", width=12, depth=2, heads=3, image_size=16, patch_size=8, channels=3, classes=3, mlp_ratio=2.0
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A model, its diagnosis, a prescription with tensors, a smaller model, evidence and images."""
    root = tmp_path_factory.mktemp("made")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        data = write_folder(root / "images", {"train": 8, "validation": 2, "test": 4}, size=(16, 16))
        run = rx.save(initialize_(VisionTransformer(CONFIG), 0).float(), root / "run")
        files = {name: root / f"{name}.json" for name in ("diagnosis", "prescription", "evidence")}
        slim = root / "slim"
        record("diagnose", run, "--data", data, "--out", files["diagnosis"])
        how = ("--rules", "total_rank:0.5", "--out", files["prescription"])
        record("prescribe", files["diagnosis"], *how)
        record("realize", run, "--prescription", files["prescription"], "--out", slim)
        words = ("verify", slim, "--reference", run, "--data", data, "--checks", "costs")
        call(*words, "--out", files["evidence"])
    finally:
        torch.set_default_dtype(before)
    return SimpleNamespace(root=root, data=data, run=run, slim=slim, **files)


@pytest.fixture
def here(made: SimpleNamespace, tmp_path: Path) -> Iterator[SimpleNamespace]:
    """A copy of it all, which a test may change, and a check that it was not."""
    root = tmp_path / "here"
    shutil.copytree(made.root, root)
    paths = {name: root / path.relative_to(made.root) for name, path in vars(made).items()}
    yield SimpleNamespace(**paths)


def test_a_diagnosis_beside_weights_of_its_name_does_not_overwrite_them(here: SimpleNamespace) -> None:
    before = visible(here.run)
    record("diagnose", here.run, "--data", here.data, "--out", here.run / "model.json")
    after = visible(here.run)
    assert {name: after[name] for name in before} == before
    assert rx.Diagnosis.load(here.run / "model.json").fingerprint == rx.Diagnosis.load(here.diagnosis).fingerprint
    rx.load(here.run)


def test_a_prescription_with_tensors_does_not_overwrite_weights_of_its_name(here: SimpleNamespace) -> None:
    weights = here.root / "vit.safetensors"
    weights.write_bytes(b"of the user")
    record("prescribe", here.diagnosis, "--rules", "total_rank:0.5", "--out", here.root / "vit.json")
    assert weights.read_bytes() == b"of the user"
    prescription = rx.Prescription.load(here.root / "vit.json")
    assert any(layer.tensors for layer in prescription.layers)
    assert prescription.ranks == rx.Prescription.load(here.prescription).ranks


def test_tensors_replace_those_of_the_same_file_only(here: SimpleNamespace) -> None:
    tensors = "prescription.json.tensors-*.safetensors"
    (first,) = here.root.glob(tensors)
    foreign = here.root / "prescription.json.tensors-0123456789ab.safetensors"
    foreign.write_bytes(b"of the user")
    other = ("--rules", "qk=total_rank:0.5,metric=weights")
    record("prescribe", here.diagnosis, *other, "--out", here.prescription)
    left = set(here.root.glob(tensors))
    assert len(left) == 2 and foreign in left and first not in left
    assert foreign.read_bytes() == b"of the user"
    (second,) = left - {foreign}
    second.write_bytes(b"of the user")
    done = call("prescribe", here.diagnosis, *other, "--out", here.prescription)
    assert done.code == 2 and str(second) in done.err and second.read_bytes() == b"of the user"
    second.unlink()
    done = call("realize", here.run, "--prescription", here.prescription, "--out", here.root / "x")
    assert done.code == 2 and second.name in done.err and "together" in done.err


def test_a_saved_model_replaces_all_that_was_recorded_of_the_former_one(here: SimpleNamespace) -> None:
    shutil.copy(here.evidence, here.slim / "evidence.json")
    (here.slim / "notes.md").write_text("of the user")
    (here.slim / "checkpoints" / "step-1").mkdir(parents=True)
    (here.slim / "checkpoints" / "step-1" / "state.json").write_text("of the user")
    (here.slim / "link").symlink_to("notes.md")
    here.slim.chmod(0o750)
    record("prescribe", here.diagnosis, "--rules", "total_rank:0.25", "--out", here.prescription)
    record("realize", here.run, "--prescription", here.prescription, "--out", here.slim)
    names = {name for name in visible(here.slim) if "tensors-" not in name}
    mine = {"notes.md", "link", "checkpoints/step-1/state.json"}
    assert names == {"config.json", "model.safetensors", "prescription.json", "README.md", *mine}
    assert len(list(here.slim.glob("*.tensors-*"))) == 1
    assert (here.slim / "link").is_symlink() and here.slim.stat().st_mode & 0o777 == 0o750
    rx.save(rx.load(here.run), here.slim)
    assert set(visible(here.slim)) == {"config.json", "model.safetensors", "README.md", *mine}


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "README.md", "prescription.json"])
def test_files_of_others_are_not_overwritten_by_a_saved_model(here: SimpleNamespace, name: str) -> None:
    folder = here.root / "other"
    folder.mkdir()
    (folder / name).write_text('{"architectures": ["ViTForImageClassification"]}')
    done = call("realize", here.run, "--prescription", here.prescription, "--out", folder)
    assert done.code == 2 and str(folder / name) in done.err and "choose another folder" in done.err
    assert list(visible(folder)) == [name]
    if name != "prescription.json":
        with pytest.raises(InvalidInput, match="attnrx did not write it"):
            rx.save(rx.load(here.run), folder)
        assert list(visible(folder)) == [name]


def test_a_link_to_a_folder_stays_a_link(here: SimpleNamespace) -> None:
    (here.root / "latest").symlink_to("slim")
    rx.save(rx.load(here.run), here.root / "latest")
    assert (here.root / "latest").is_symlink() and "evidence.json" not in visible(here.slim)
    assert rx.models.model_fingerprint(rx.load(here.slim)) == rx.models.model_fingerprint(rx.load(here.run))


def test_the_current_folder_is_filled_but_never_replaced(
    here: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here.root / "empty").mkdir()
    monkeypatch.chdir(here.root / "empty")
    rx.save(rx.load(here.run), ".")
    before = visible(Path())
    assert set(before) == {"config.json", "model.safetensors", "README.md"}
    with pytest.raises(CheckpointError, match="current folder"):
        rx.save(rx.load(here.slim), ".")
    assert visible(Path()) == before


@pytest.mark.parametrize("missing", ["exchange", "hard links"])
def test_file_systems_that_can_do_less(here: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    (here.slim / "notes.txt").write_text("of the user")
    if missing == "exchange":
        monkeypatch.setattr(atomic_writes, "exchange_names", lambda first, second: False)
    else:
        monkeypatch.setattr(os, "link", lambda *_, **__: (_ for _ in ()).throw(PermissionError(1, "no hard links")))
    rx.save(rx.load(here.run), here.slim)
    assert set(visible(here.slim)) == {"config.json", "model.safetensors", "README.md", "notes.txt"}
    assert not list(here.root.glob(".*"))


def test_verification_changes_nothing_but_the_file_it_was_given(here: SimpleNamespace) -> None:
    before = visible(here.root)
    words = ("verify", here.slim, "--reference", here.run, "--data", here.data, "--checks", "costs,fidelity")
    done = record(*words)
    assert done["evidence"] is None and done["findings"]
    assert visible(here.root) == before
    assert "printed only; --out FILE writes it" in call(*words).out
    record(*words, "--out", here.slim / "evidence.json")
    assert visible(here.root).keys() - before.keys() == {"slim/evidence.json"}
    assert {name: visible(here.root)[name] for name in before} == before
    record(*words, "--out", here.slim / "evidence.json")  # its own kind of file may be replaced


INPUTS = [
    ("prescribe {diagnosis} --rules top_rank:1 --out {diagnosis}", "diagnosis"),
    ("report --candidate {slim} --out {slim}/prescription.json", "candidate"),
    ("diagnose {run} --data {data} --out {data}/train/cat/000.png", "data"),
    ("verify {slim} --reference {run} --data {data} --diagnosis {diagnosis} --out {diagnosis}", "diagnosis"),
    ("export {run} --out {run}/config.json", "model"),
    ("realize {run} --prescription {slim}/prescription.json --out {slim}", "prescription"),
    ("train {run} --data {data} --out {run}", "model"),
]


@pytest.mark.parametrize("link", ["", "symbolic", "hard"])
@pytest.mark.parametrize(("words", "option"), INPUTS)
def test_an_output_that_is_an_input_is_refused(
    made: SimpleNamespace, tmp_path: Path, words: str, option: str, link: str
) -> None:
    before = visible(made.root)
    *requested, out = words.format(**vars(made)).split()
    if link:
        if Path(out).is_dir() and link == "hard":
            pytest.skip("folders have no hard links")
        name = tmp_path / "link.json"
        name.symlink_to(out) if link == "symbolic" else os.link(out, name)
        if link == "hard" and option in ("candidate", "model", "data", "reference"):
            pytest.skip("a second name of a file in an input folder is a file of its own, which is replaced alone")
        out = str(name)
    done = call(*requested, out)
    refusal = rf"would (overwrite an input: .* \(--{option}\)|replace )"
    assert done.code == 2 and re.search(refusal, done.err), done.err
    assert visible(made.root) == before


@pytest.mark.parametrize("command", ["prescribe {diagnosis} --rules top_rank:1", "report --diagnosis {diagnosis}"])
@pytest.mark.parametrize("kind", ["fifo", "device", "socket", "folder", "nothing"])
def test_an_output_that_is_no_regular_file_is_refused(
    made: SimpleNamespace, tmp_path: Path, command: str, kind: str
) -> None:
    out = tmp_path / "out"
    if kind == "fifo":
        os.mkfifo(out)
    elif kind == "device":
        out.symlink_to("/dev/null")
    elif kind == "folder":
        out.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(out))
    before = out.lstat().st_mode if kind != "nothing" else None
    done = call(*command.format(**vars(made)).split(), "--out", "" if kind == "nothing" else out)
    said = "--out is empty" if kind == "nothing" else "cannot be written"
    assert done.code == 2 and said in done.err and "Traceback" not in done.err
    assert kind == "nothing" or out.lstat().st_mode == before
    assert Path("/dev/null").is_char_device()


def test_evidence_of_another_model_is_not_shown(here: SimpleNamespace) -> None:
    shutil.copy(here.evidence, here.run / "evidence.json")
    for words in (("--candidate", here.run), ("--candidate", here.run, "--evidence", here.evidence)):
        done = call("report", *words, "--out", here.root / "report.html")
        assert done.code == 2 and "evidence was measured on the model" in done.err
    assert not (here.root / "report.html").exists()
    assert (
        call("report", "--candidate", here.slim, "--evidence", here.evidence, "--out", here.root / "r.html").code == 0
    )
    evidence = rx.Evidence.load(here.evidence)
    for refused in (
        lambda: rx.save(rx.load(here.run), here.run, evidence=evidence),
        lambda: rx.push_to_hub(here.run, "a/b"),
    ):
        with pytest.raises(FingerprintMismatch, match="verify that model"):
            refused()


def _dead_process() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def test_files_of_killed_processes_are_deleted_by_the_next_write(here: SimpleNamespace) -> None:
    host, dead = atomic_writes._HOST, _dead_process()
    gone = [f".evidence.json.{host}-{dead}-0123abcd.partial"]
    kept = [
        f".evidence.json.{host}-{os.getpid()}-0123abcd.partial",  # another thread
        f".evidence.json.aaaaaa-{dead}-0123abcd.partial",  # another machine
        f".other.json.{host}-{dead}-0123abcd.partial",
        f"evidence.json.{host}-{dead}-0123abcd.partial",
        ".evidence.json.partial",
    ]
    for name in (*gone, *kept):
        (here.root / name).write_text("half")
    rx.Evidence((), {}).save(here.evidence)
    assert not (here.root / gone[0]).exists() and all((here.root / name).exists() for name in kept)
    for folder in (
        here.root / f".slim.{host}-{dead}-0123abcd.partial",
        here.slim / f".slim.{host}-{dead}-89abcdef.partial",
    ):
        folder.mkdir()
        (folder / "model.safetensors").write_text("half")
    rx.save(rx.load(here.run), here.slim)
    assert not list(here.root.glob(".slim*")) and not list(here.slim.glob(".*"))


SLOW = """
import signal, sys, time
import attnrx as rx
from attnrx.cli import main
from pathlib import Path

def slow(self, path):
    def write(temporary):
        temporary.write_text("half")
        print("writing", file=sys.stderr, flush=True)
        time.sleep(60)
    return rx.serialization.write_atomically(path, write)

rx.Prescription.save = slow
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in what it runs in the background
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("number", "code", "said"), [(signal.SIGTERM, 143, "terminated"), (signal.SIGINT, 130, "interr")]
)
@pytest.mark.slow
def test_a_signal_ends_a_command_with_one_line_and_no_temporary_files(
    here: SimpleNamespace, number: signal.Signals, code: int, said: str
) -> None:
    before = visible(here.root)
    words = ("prescribe", here.diagnosis, "--rules", "total_rank:0.25", "--out", here.prescription)
    command = [sys.executable, "-c", SLOW, *map(str, words)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "writing\n"
        assert list(here.root.glob("*.partial"))
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    assert process.returncode == code and out == "" and err.count("\n") == 1 and said in err
    assert visible(here.root) == before and not list(here.root.glob("*.partial"))
