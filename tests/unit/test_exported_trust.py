"""Files that are native code are loaded only where the caller states that they are trusted."""

from pathlib import Path

import pytest
import torch

import attnrx as rx
from attnrx.errors import AttnrxError, CheckpointError, InvalidInput
from attnrx.exporting import FORMATS, load_exported
from attnrx.serialization.config import to_dict
from attnrx.serialization.storage import file_sha256, write_json
from test_cli import call


def planted(folder: Path, form: str) -> Path:
    """A file of this format with facts that name its hash, as anybody can write them."""
    path = folder / f"model{FORMATS[form].suffix}"
    path.write_bytes(b"content")
    images = {"shape": [3, 8, 8], "precision": "float32", "batch": None, "device": "cpu"}
    facts = {"kind": "attnrx exported model", "schema": 1, "format": to_dict(FORMATS[form]()), "images": images}
    facts |= {"normalization": {"mean": [0.5] * 3, "std": [0.5] * 3}, "class_names": []}
    write_json(folder / f"{path.name}.json", {**facts, "files": {path.name: file_sha256(path)}})
    return path


def test_an_aotinductor_package_needs_trust(tmp_path: Path) -> None:
    path = planted(tmp_path, "aotinductor")
    for load in (rx.load, load_exported):
        with pytest.raises(InvalidInput, match=r"native code.*trust=True.*--trust"):
            load(path)
        assert isinstance(load(path, trust=True), rx.exporting.Exported)


@pytest.mark.parametrize("form", sorted({*FORMATS} - {"aotinductor"}))
def test_files_of_other_formats_need_no_trust(form: str, tmp_path: Path) -> None:
    try:
        rx.load(planted(tmp_path, form))
    except AttnrxError as error:
        assert "trust" not in str(error)


def test_commands_take_trust(tmp_path: Path) -> None:
    path = planted(tmp_path, "aotinductor")
    data = ("--data", "digits", "--out", tmp_path / "out.json")
    for words in (
        ("verify", path, "--reference", "svda:digits", *data),
        ("verify", "svda:digits", "--reference", path, *data),
        ("bench", path, "--methods", "half=uniform_rank:0.5", "--out", tmp_path / "out.json"),
        ("report", "--candidate", path, "--out", tmp_path / "report.html"),
    ):
        done = call(*words)
        assert done.code == 2 and "native code" in done.err and "--trust" in done.err
        done = call(*words, "--trust")
        assert done.code == 2 and "native code" not in done.err


def test_a_trusted_package_that_cannot_be_opened_is_refused_when_it_runs(tmp_path: Path) -> None:
    model = rx.load(planted(tmp_path, "aotinductor"), trust=True)
    with pytest.raises(CheckpointError, match="cannot be opened as aotinductor"):
        model(torch.zeros(1, 3, 8, 8, dtype=torch.float32))
