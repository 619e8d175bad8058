"""Files that can run code of their author are opened only where the caller states that they are trusted."""

import copy
from pathlib import Path

import pytest
import torch

import attnrx as rx
from attnrx.exporting import FORMATS, load_exported
from attnrx.support.errors import AttnrxError, CheckpointError, InvalidInput
from attnrx.support.storage import file_sha256, read_json, write_json
from support.command_line import call
from support.exported_files import planted

RUN_CODE = ("aotinductor", "program")


class Bomb:
    """A pickle of it creates a file when it is read."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("form", RUN_CODE)
def test_a_file_of_torch_needs_trust(form: str, tmp_path: Path) -> None:
    path = planted(tmp_path, form)
    for load in (rx.load, load_exported):
        with pytest.raises(InvalidInput, match=r"can run any code.*trust=True.*--trust"):
            load(path)
        assert isinstance(load(path, trust=True), rx.exporting.Exported)


@pytest.mark.parametrize("suffix", [".pt2", ".onnx", ".xml"])
@pytest.mark.parametrize("form", sorted(FORMATS))
def test_a_pickle_is_read_in_no_file_without_trust(form: str, suffix: str, tmp_path: Path) -> None:
    """Whatever its facts state: they are written by whoever wrote the file."""
    path = planted(tmp_path, form)
    torch.save({"weights": Bomb(tmp_path / "ran")}, path)
    facts = read_json(path.with_name(f"{path.name}.json"))
    path = path.rename(path.with_suffix(suffix))
    facts["files"] = {path.name: file_sha256(path)}
    write_json(path.with_name(f"{path.name}.json"), facts)
    with pytest.raises(AttnrxError):
        rx.load(path)(torch.zeros(1, 3, 8, 8, dtype=torch.float32))
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_the_file_that_this_process_has_just_written_needs_none(tmp_path: Path) -> None:
    model = rx.models.build_model("svda:digits").float()
    exported = rx.export(model, tmp_path / "model.pt2", "program", batch=1)
    images = torch.randn(1, *rx.models.family_of(model).input_shape(model), dtype=torch.float32)
    assert exported(images).shape == (1, 10)
    assert torch.equal(copy.deepcopy(exported)(images), exported(images))
    with pytest.raises(InvalidInput, match="trust"):
        rx.load(tmp_path / "model.pt2")


@pytest.mark.parametrize("form", sorted({*FORMATS} - {*RUN_CODE}))
def test_files_of_other_formats_need_no_trust(form: str, tmp_path: Path) -> None:
    try:
        rx.load(planted(tmp_path, form))
    except AttnrxError as error:
        assert "trust" not in str(error)


@pytest.mark.parametrize("form", ["program", pytest.param("aotinductor", marks=pytest.mark.slow)])
def test_commands_take_trust(form: str, tmp_path: Path) -> None:
    path = planted(tmp_path, form)
    data = ("--data", "digits", "--out", tmp_path / "out.json")
    for words in (
        ("verify", path, "--reference", "svda:digits", *data),
        ("verify", "svda:digits", "--reference", path, *data),
        ("bench", path, "--methods", "half=uniform_rank:0.5", "--out", tmp_path / "out.json"),
        ("report", "--candidate", path, "--out", tmp_path / "report.html"),
    ):
        done = call(*words)
        assert done.code == 2 and "can run any code" in done.err and "--trust" in done.err
        done = call(*words, "--trust")
        assert done.code == 2 and "can run any code" not in done.err


@pytest.mark.parametrize("form", RUN_CODE)
def test_a_trusted_file_that_cannot_be_opened_is_refused_when_it_runs(form: str, tmp_path: Path) -> None:
    model = rx.load(planted(tmp_path, form), trust=True)
    with pytest.raises(CheckpointError, match=f"cannot be opened as {form}"):
        model(torch.zeros(1, 3, 8, 8, dtype=torch.float32))
