"""No file says who made it, or where: neither folders of the machine, nor names of the user and the host."""

import getpass
import os
import signal
import socket
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import attnrx as rx
from attnrx.exporting import FORMATS
from attnrx.support.optional import is_installed
from support import report_content, tiny_runs
from support.command_line import call
from support.pictures import CLASSES, rows, write_parquet
from support.pretrained import of_timm

USER, HOST = "user-of-this-machine", "host-of-this-machine"
CALIBRATED = ("int8", "openvino(precision=int8)")


def contents(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yields every file below a path, and the files in those that are zips."""
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            yield file.name, file.read_bytes()
        if file.is_file() and zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                yield from ((f"{file.name}/{name}", name.encode() + archive.read(name)) for name in archive.namelist())


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to write to, on a machine whose names are known."""
    home, here = tmp_path / "home-of-the-user", tmp_path / "current-folder"
    home.mkdir()
    here.mkdir()
    monkeypatch.chdir(here)
    for name, value in {"HOME": str(home), "USER": USER, "LOGNAME": USER, "HOSTNAME": HOST}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(getpass, "getuser", lambda: USER)
    monkeypatch.setattr(socket, "gethostname", lambda: HOST)
    return tmp_path / "written"


def require_private(folder: Path, tmp_path: Path) -> None:
    words = [str(tmp_path), str(Path(rx.__file__).parent), str(Path.home()), USER, HOST]
    words += ["site-packages", "dist-packages", "Traceback", "/tmp/", "home-of-the-user", "current-folder"]
    found = {
        (name, word)
        for name, content in contents(folder)
        for word in words
        for text in (word.encode(), word.encode("utf-16-le"))
        if text in content
    }
    assert not found, sorted(found)


def model() -> Any:
    return rx.load(of_timm("vit_tiny_patch16_224", depth=3, num_classes=len(CLASSES))).float()


def images(count: int = 64) -> torch.Tensor:
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float32)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("form", [*FORMATS, "openvino(precision=int8)"])
def test_exported_files_name_no_folder(form: str, place: Path, tmp_path: Path) -> None:
    kind = rx.exporting.parse_format(form)
    if not all(map(is_installed, kind.libraries)):
        pytest.skip(f"{form} is not installed")
    place.mkdir()
    given: dict[str, Any] = {"calibration": images()} if form in CALIBRATED else {}
    rx.export(model(), place / f"model{kind.suffix}", form, **given)
    require_private(place, tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_written_folders_name_no_folder(place: Path, tmp_path: Path) -> None:
    original, data = model(), images()
    shrunk = rx.shrink(original, {"train": data, "test": data[:32]}, macs=0.8, effort="quick")
    shrunk.save(place / "shrunk", original=original)
    assert {"report.html", "README.md", "evidence.json", "model.onnx", "run_model.py"} <= {
        path.name for path in (place / "shrunk").iterdir()
    }
    rx.elastic(original, data, place / "elastic", macs=(0.8,), effort="quick")
    diagnosis = rx.diagnose(original, data)
    diagnosis.save(place / "diagnosis.json")
    rx.plan(original, diagnosis, "macs=0.8x", data[:32], data[32:]).save(place / "plan")
    rx.prescribe(diagnosis, "qk=total_rank:0.5 vo=total_rank:0.5").save(place / "prescription.json")
    tiny_runs.run(place / "run")
    require_private(place, tmp_path)


@pytest.mark.slow
def test_files_of_commands_with_absolute_paths_name_no_folder(place: Path, tmp_path: Path) -> None:
    data = write_parquet(tmp_path / "pets.parquet", rows(60) + rows(30, "test"))
    rx.save(model(), tmp_path / "original")
    for words in (
        ("shrink", tmp_path / "original", "--data", data, "--macs", 0.8, "--out", place / "shrunk"),
        ("diagnose", tmp_path / "original", "--data", data, "--out", place / "diagnosis.json"),
        ("prescribe", place / "diagnosis.json", "--rules", "qk=total_rank:0.5", "--out", place / "prescription.json"),
        ("realize", tmp_path / "original", "--prescription", place / "prescription.json", "--out", place / "slim"),
        ("verify", place / "slim", "--reference", tmp_path / "original", "--data", data, "--out", place / "e.json"),
        ("report", "--candidate", place / "slim", "--evidence", place / "e.json", "--out", place / "report.html"),
        ("train", place / "slim", "--data", data, "--out", place / "run", "--epochs", 1),
        ("elastic", tmp_path / "original", "--data", data, "--macs", 0.8, "--out", place / "sizes"),
        ("export", tmp_path / "original", "--data", data, "--to", "program", "--out", place / "model.pt2"),
    ):
        done = call(*words)
        assert done.code in (0, 1), done.err
    require_private(place, tmp_path)


@pytest.mark.slow
def test_a_stopped_training_with_a_teacher_names_no_folder(place: Path, tmp_path: Path) -> None:
    data = write_parquet(tmp_path / "pets.parquet", rows(60) + rows(30, "test"))
    rx.save(model(), tmp_path / "original")
    words = ("train", tmp_path / "original", "--data", data, "--out", place, "--epochs", 2, "--checkpoint-every", 1)
    words += ("--losses", "distillation", "--teacher", tmp_path / "original", "--precision", "fp32", "--batch-size", 20)
    with tiny_runs.at(2, lambda: os.kill(os.getpid(), signal.SIGINT)):
        assert call(*words).code == 130
    require_private(place, tmp_path)
    assert call(*words).code == 0
    require_private(place, tmp_path)
    assert {path.suffix for path in place.rglob("*") if path.is_file()} == {".json", ".jsonl", ".safetensors"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_files_of_the_laboratory_name_no_folder(place: Path, tmp_path: Path) -> None:
    data = write_parquet(tmp_path / "pets.parquet", rows(60) + rows(30, "test"))
    rx.save(model(), tmp_path / "original")
    methods = ("--methods", "a=total_rank:{share}", f"b={tmp_path / 'original'}", "--macs", 0.97)
    about = ("--tiny", "--seeds", 7, "--out", place / "runs")
    for words in (
        ("compare", tmp_path / "original", "--data", data, *methods, "--out", place / "comparison.json"),
        ("bench", tmp_path / "original", *methods, "--rounds", 2, "--batches", 1, "--out", place / "speeds"),
        ("reproduce", "svda/table1", *about),
        ("reproduce", "irratt/table1", "--only", "deit_small", "--model", tmp_path / "original", *about),
    ):
        done = call(*words)
        assert done.code in (0, 1), done.err
    require_private(place, tmp_path)


def test_pages_with_figures_name_no_folder(place: Path, tmp_path: Path) -> None:
    rx.write_report(place / "report.html", report_content.example())
    require_private(place, tmp_path)
