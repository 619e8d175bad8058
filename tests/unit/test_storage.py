"""Files are whole or absent."""

import errno
from pathlib import Path

import pytest
import torch

from attnrx.support.errors import CheckpointError
from attnrx.support.storage import (
    fingerprint,
    read_json,
    read_tensors,
    write_atomically,
    write_json,
    write_tensors,
    write_text,
)


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = write_json(tmp_path / "a.json", {"value": 1})

    def interrupted(temporary: Path) -> None:
        temporary.write_text('{"val')
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, interrupted)
    assert read_json(path) == {"value": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


def test_a_full_disk_leaves_the_old_file_and_says_so(tmp_path: Path) -> None:
    path = write_json(tmp_path / "a.json", {"value": 1})

    def full(temporary: Path) -> None:
        temporary.write_text('{"val')
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CheckpointError, match="No space left"):
        write_atomically(path, full)
    assert read_json(path) == {"value": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


def test_a_text_may_be_empty(tmp_path: Path) -> None:
    """The history of a run that was stopped before its first epoch is."""
    assert write_text(tmp_path / "history.jsonl", "").read_bytes() == b""


def test_json_holds_no_nan(tmp_path: Path) -> None:
    path = write_json(tmp_path / "a.json", {"values": [float("nan"), float("inf"), 1.5], "nested": {"tuple": (1, 2)}})
    assert read_json(path) == {"values": [None, None, 1.5], "nested": {"tuple": [1, 2]}}


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[1,"])
def test_broken_json_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"a\.json"):
        read_json(tmp_path / "a.json")


def test_tensors_survive_and_truncation_is_found(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 4), "b": torch.arange(5), "c": torch.zeros(0, 2)}
    path = write_tensors(tmp_path / "t.safetensors", tensors)
    again = read_tensors(path)
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="truncated"):
        read_tensors(path)


def test_fingerprints_tell_models_apart() -> None:
    one = {"a": torch.zeros(4)}
    assert fingerprint(one) == fingerprint({"a": torch.zeros(4)})
    others = (
        {"b": torch.zeros(4)},
        {"a": torch.zeros(2, 2)},
        {"a": torch.zeros(4).float()},
        {"a": torch.tensor([0.0, 0, 0, 1e-300])},
    )
    assert len({fingerprint(one), *(fingerprint(other) for other in others)}) == 5
