"""Folders whose files are replaced together: interrupted anywhere, written by several at once, and file_lock."""

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import attnrx as rx
from attnrx.support import atomic_writes
from attnrx.support.atomic_writes import file_lock, parts_by, replacing_folder
from attnrx.support.errors import CheckpointError
from support.interruptions import snapshots, visible
from support.planned import original

NAMES = ("a.json", "b.bin", "last.json")


def is_part(path: Path) -> bool:
    return path.is_file() and path.read_bytes().startswith(b"own")


def write(folder: Path, number: int, names: tuple[str, ...] = NAMES) -> None:
    with replacing_folder(folder, parts_by(is_part), last="last.json") as new:
        for name in names:
            (new / name).write_text(f"own {number}")


@pytest.mark.parametrize("system", ["exchanges names", "renames only"])
@pytest.mark.parametrize("before", ["nothing", "others", "results"])
def test_a_kill_leaves_the_old_or_the_new_files_and_the_next_write_works(
    system: str, before: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if system == "renames only":
        monkeypatch.setattr(atomic_writes, "exchange_names", lambda first, second: False)
    folder = tmp_path / "root" / "folder"
    if before != "nothing":
        (folder / ".state").mkdir(parents=True)
        (folder / ".state" / "trials").write_text("of the user")
        (folder / "notes").write_text("of the user")
    if before == "results":
        write(folder, 0, ("a.json", "only the first.json", "last.json"))
    folder.parent.mkdir(exist_ok=True)
    old = visible(folder)
    watch, copies = snapshots(tmp_path / "root", lambda: write(folder, 1), tmp_path / "copies")
    new = visible(folder)
    assert set(new) >= set(NAMES) and "only the first.json" not in new and (before == "nothing") == ("notes" not in new)
    monkeypatch.setattr(atomic_writes, "process_runs", lambda number: False)
    for event, copy in zip([*watch.events, "the end"], copies, strict=True):
        atomic_writes.restore(copy / "folder")
        assert visible(copy / "folder") in (old, new), event
        write(copy / "folder", 1)
        assert visible(copy / "folder") == new and not list(copy.glob(".*")), event


def test_a_folder_that_cannot_be_exchanged_gets_its_files_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, 0)
    with pytest.raises(CheckpointError, match="current folder"):
        write(tmp_path, 1)
    assert set(visible(tmp_path).values()) == {b"own 0"}


def test_what_others_add_during_the_exchange_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "folder", 0)
    swap = atomic_writes.swap_folders

    def late(temporary: Path, target: Path) -> None:
        (target / "notes").write_text("of the user")
        swap(temporary, target)

    monkeypatch.setattr(atomic_writes, "swap_folders", late)
    write(tmp_path / "folder", 1)
    assert visible(tmp_path / "folder") == {"notes": b"of the user"} | dict.fromkeys(NAMES, b"own 1")


def at_once(*calls: Callable[[], object]) -> None:
    with ThreadPoolExecutor(len(calls)) as pool:
        for each in [pool.submit(call) for call in calls]:
            each.result()


def test_several_at_once_leave_the_files_of_one(tmp_path: Path) -> None:
    def often(number: int) -> None:
        for _ in range(3):
            write(tmp_path / "folder", number, (*NAMES, f"only {number}.json"))

    at_once(*(lambda number=number: often(number) for number in range(3)))
    files = visible(tmp_path / "folder")
    assert len(set(files.values())) == 1 and len(files) == 4
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("verb", ["shrink", "elastic"])
def test_one_call_at_a_time_uses_a_folder(verb: str, tmp_path: Path) -> None:
    call = {
        "shrink": lambda: rx.shrink(original(), [], macs=0.8, folder=tmp_path / "folder"),
        "elastic": lambda: rx.elastic(original(), [], tmp_path / "folder", macs=(0.8,)),
    }[verb]
    with file_lock(tmp_path / "folder"), pytest.raises(CheckpointError, match="being written by another"):
        at_once(call)
    assert not list(tmp_path.iterdir())


def test_a_model_whose_replacement_was_interrupted_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where names cannot be exchanged, a kill between two renames leaves the model under another name."""
    folder = rx.save(original(), tmp_path / "model")
    old = atomic_writes.temporary_path(folder).with_suffix(".old")
    folder.rename(old)
    monkeypatch.setattr(atomic_writes, "process_runs", lambda number: False)
    assert rx.models.model_fingerprint(rx.load(folder)) == rx.models.model_fingerprint(original())
    shutil.rmtree(folder)
