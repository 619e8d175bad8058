"""Splits that are decoded on the way: photographs in any order, tar shards from front to back."""

import json
import shutil
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from attnrx.data import Batch, ImageSet, Normalization, Splits, load_data
from attnrx.data import loading as loading_module
from attnrx.data import shards as shards_module
from attnrx.data.loaded_images import StreamedImages
from attnrx.data.shards import ShardImages
from attnrx.support.errors import DataError
from pictures import CLASSES, rows, write_folder, write_parquet, write_shard


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts of scanned shards go to a folder of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def photographs(tmp_path: Path) -> Splits:
    """Pictures of 130x100, large enough to be taken for photographs, at a model's size of 16."""
    return load_data(
        write_parquet(tmp_path / "pets.parquet", rows(40, size=(130, 100)) + rows(9, "test")), image_size=16
    )


@pytest.fixture
def shards(tmp_path: Path) -> Splits:
    """Six shards of train, of 5 to 10 samples, and one of test."""
    first = 0
    for number in range(6):
        write_shard(tmp_path / "pets" / f"train-{number:03d}.tar", first, 5 + number)
        first += 5 + number
    write_shard(tmp_path / "pets" / "test-000.tar", 0, 12)
    return load_data(tmp_path / "pets")


def index(batches: list[Batch]) -> list[int]:
    return [int(row) for batch in batches for row in batch.index]


def passes(images: ImageSet, augmented: Splits, **options: object) -> list[Batch]:
    return list(images.batches(4, seed=5, augmentation=augmented.augmentation, **options))  # type: ignore[arg-type]


def equal(left: list[Batch], right: list[Batch]) -> bool:
    return len(left) == len(right) and all(
        torch.equal(a.images, b.images) and torch.equal(a.index, b.index) and torch.equal(a.labels, b.labels)
        for a, b in zip(left, right, strict=True)
    )


# photographs


def test_photographs_stream_in_the_order_of_the_file(photographs: Splits) -> None:
    assert isinstance(photographs.train, StreamedImages)
    assert photographs.augmentation is not None and photographs.augmentation.area == (0.08, 1.0)
    batches = list(photographs.test.batches(4))
    assert [len(batch) for batch in batches] == [4, 4, 1]
    assert index(batches) == list(range(40, 49))
    labels = torch.cat([batch.labels for batch in batches])
    red = torch.cat([photographs.normalization.invert(batch.images)[:, 0].mean((1, 2)) for batch in batches])
    assert torch.equal((red * 255).round().long(), 40 * labels)


def test_a_stream_can_be_resumed_and_shared(photographs: Splits) -> None:
    whole = passes(photographs.train, photographs)
    assert len(whole) == len(photographs.train) // 4
    assert equal(passes(photographs.train, photographs), whole)
    assert equal(passes(photographs.train, photographs, start=3), whole[3:])
    left, right = (passes(photographs.train, photographs, shard=(process, 2)) for process in (0, 1))
    for one, other, both in zip(left, right, whole, strict=True):
        assert torch.equal(torch.cat([one.images, other.images]), both.images)
        assert torch.equal(torch.cat([one.index, other.index]), both.index)


def test_windows_are_random_only_in_training(photographs: Splits) -> None:
    one = photographs.train.take(4)
    still = next(one.batches(4)).images
    assert torch.equal(next(one.batches(4)).images, still)
    first, second = (next(one.batches(4, seed=seed, augmentation=photographs.augmentation)) for seed in (1, 2))
    assert not torch.equal(first.images[first.index.argsort()], second.images[second.index.argsort()])


def test_a_pass_that_is_left_early_leaves_nothing_behind(photographs: Splits) -> None:
    batches = photographs.train.batches(4)
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert len(next(photographs.train.batches(4))) == 4


def test_a_set_too_large_for_memory_streams_the_same_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(tmp_path / "small.parquet", rows(40) + rows(6, "test"))
    in_memory = load_data(path)
    monkeypatch.setattr(loading_module, "IN_MEMORY", 1000)
    monkeypatch.setenv("ATTNRX_CACHE", str(tmp_path / "other"))
    streamed = load_data(path)
    assert isinstance(streamed.train, StreamedImages)
    assert equal(passes(streamed.train, streamed), passes(in_memory.train, in_memory))
    assert equal(list(streamed.test.take(4).batches(3)), list(in_memory.test.take(4).batches(3)))


def test_corrupt_photographs_are_named_or_left_out(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "pets", {"train": 6, "test": 2}, size=(100, 120))
    broken = root / "train" / "dog" / "003.png"
    broken.write_bytes(broken.read_bytes()[:60])
    with pytest.raises(DataError, match=r"train/dog/003.png.*on_corrupt='skip'"):
        strict = load_data(root, image_size=16)
        for images in (strict.train, strict.validation):
            list(images.batches(4))
    splits = load_data(root, image_size=16, on_corrupt="skip")
    seen = [batch for images in (splits.train, splits.validation) for batch in images.batches(4)]
    assert len(index(seen)) == 17
    assert isinstance(splits.train, StreamedImages)
    assert isinstance(splits.validation, StreamedImages)
    assert "003.png" in "".join(splits.train.skipped + splits.validation.skipped)
    (root / "train" / "dog" / "000.png").write_bytes(b"")
    broken.unlink()
    alone = load_data(root, image_size=16, on_corrupt="skip")
    with pytest.raises(DataError, match="none of the 1 images"):
        for images in (alone.train, alone.validation):
            list(images.batches(1))


def test_another_scale_is_the_same_image(photographs: Splits) -> None:
    half = photographs.renormalized(Normalization((0.1, 0.2, 0.3), (1.0, 1.0, 1.0)))
    before, after = next(photographs.test.batches(3)).images, next(half.test.batches(3)).images
    assert torch.allclose(photographs.normalization.invert(before), half.normalization.invert(after), atol=1e-6)


# shards


def test_shards_are_read_from_front_to_back(shards: Splits) -> None:
    assert isinstance(shards.train, ShardImages)
    assert (len(shards.train), len(shards.validation), len(shards.test)) == (35, 10, 12)
    assert shards.class_names == ("0", "1", "2")
    assert any("the last 1 of 6 train shards" in note for note in shards.notes)
    batches = list(shards.train.batches(8))
    assert index(batches) == list(range(35))
    assert torch.cat([batch.labels for batch in batches]).tolist() == [i % 3 for i in range(35)]
    green = torch.cat([shards.normalization.invert(batch.images)[:, 1, 0, 0] for batch in batches])
    assert (green * 255).round().long().tolist() == list(range(35)), "the picture belongs to its label"


def test_a_shuffled_pass_over_shards(shards: Splits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards_module, "WINDOW", 6)
    whole = passes(shards.train, shards)
    assert [len(batch) for batch in whole] == [4] * 8
    assert len(set(index(whole))) == 32
    assert index(whole) != sorted(index(whole))
    assert equal(passes(shards.train, shards), whole)
    assert equal(passes(shards.train, shards, start=5), whole[5:])
    assert index(list(shards.train.batches(4, seed=6))) != index(whole)


def test_processes_share_the_shards(shards: Splits) -> None:
    ordered = [list(shards.train.batches(8, shard=(process, 2))) for process in (0, 1)]
    assert sorted(index(ordered[0]) + index(ordered[1])) == list(range(35))
    shuffled = [passes(shards.train, shards, shard=(process, 2)) for process in (0, 1)]
    assert [len(share) for share in shuffled] == [8, 8]
    assert {len(batch) for share in shuffled for batch in share} == {2}


@pytest.mark.parametrize("processes", [1, 2, 4, 8])
def test_every_image_is_seen_by_one_process_once(processes: int, tmp_path: Path) -> None:
    """However unequal the shards are, and also where there are more processes than shards."""
    for number, count in enumerate((2, 30, 9, 9)):
        write_shard(tmp_path / f"train-{number}.tar", 100 * number, count)
    train = load_data(tmp_path).train
    assert len(train) == 32
    for seed in (0, 1):
        shares = [list(train.batches(8, seed=seed, shard=(process, processes))) for process in range(processes)]
        assert sorted(row for share in shares for row in index(share)) == list(range(32))
        for process, share in enumerate(shares):
            assert [len(batch) for batch in share] == [8 // processes] * 4
            resumed = list(train.batches(8, seed=seed, shard=(process, processes), start=3))
            assert equal(resumed, share[3:])
    ordered = [list(train.batches(8, shard=(process, processes))) for process in range(processes)]
    assert [row for share in ordered for row in index(share)] == list(range(32))


@pytest.mark.parametrize("processes", [1, 2, 3, 9])
def test_parts_are_whole_batches_of_a_pass(processes: int, shards: Splits, photographs: Splits) -> None:
    for images in (shards.train, photographs.train):
        parts = [images.part(process, processes, 4) for process in range(processes)]
        batches = [batch for part in parts if len(part) for batch in part.batches(4)]
        assert equal(batches, list(images.batches(4)))
        assert all(list(part.batches(4)) == [] for part in parts if not len(part))


def test_taking_from_shards(shards: Splits) -> None:
    taken = shards.train.take(12)
    assert len(taken) == 12
    assert index(list(taken.batches(5))) == list(range(12))
    assert taken.fingerprint != shards.train.fingerprint


def test_patterns_names_and_an_index_of_shards(tmp_path: Path) -> None:
    for number in range(4):
        write_shard(tmp_path / f"part-{number:02d}.tar", 9 * number, 9)
    (tmp_path / "classnames.txt").write_text("\n".join(CLASSES) + "\n")
    splits = load_data(str(tmp_path / "part-{00..03}.tar"))
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (18, 9, 9)
    assert splits.class_names == CLASSES
    (tmp_path / "classnames.txt").write_text("\n".join(CLASSES))  # without a final newline
    again = load_data(str(tmp_path / "part-0{0,1,2,3}*.tar"))
    assert len(again.train) == 18 and again.class_names == CLASSES
    with pytest.raises(DataError, match=r"part-04.tar does not exist"):
        load_data(str(tmp_path / "part-{00..04}.tar"))


def test_an_index_of_remote_shards(tmp_path: Path) -> None:
    pytest.importorskip("webdataset")
    if shutil.which("curl") is None:
        pytest.skip("webdataset downloads with curl, which is not installed")
    for name in ("train-0", "train-1", "val-0"):
        write_shard(tmp_path / f"{name}.tar", 0, 9)
    handler = partial(Silent, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        where = f"http://127.0.0.1:{server.server_port}"
        listed = [{"url": f"{where}/{name}.tar", "nsamples": 9} for name in ("train-0", "train-1", "val-0")]
        index_file = tmp_path / "index.json"
        index_file.write_text(json.dumps({"shardlist": listed, "class_names": CLASSES}))
        splits = load_data(index_file)
        assert (len(splits.train), len(splits.validation), len(splits.test)) == (9, 9, 9)
        assert index(list(splits.train.batches(4))) == list(range(9))
        listed[0]["nsamples"] = 10
        index_file.write_text(json.dumps({"shardlist": listed, "class_names": CLASSES}))
        with pytest.raises(DataError, match="holds 9 images, not 10"):
            load_data(index_file)
        server.shutdown()


class Silent(SimpleHTTPRequestHandler):
    """A file server that does not log."""

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_what_can_be_wrong_with_shards(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="too few train shards"):
        write_shard(tmp_path / "a" / "train-0.tar", 0, 5)
        load_data(tmp_path / "a")

    for number in range(3):
        write_shard(tmp_path / "b" / f"train-{number}.tar", 0, 9)
    whole = tmp_path / "b" / "train-1.tar"
    whole.write_bytes(whole.read_bytes()[:3000])
    with pytest.raises(DataError, match=r"train-1.tar is not a whole tar file"):
        load_data(tmp_path / "b")

    (tmp_path / "b" / "index.json").write_text('{"shards": []}')
    with pytest.raises(DataError, match="is not an index of shards"):
        load_data(tmp_path / "b" / "index.json")
    with pytest.raises(DataError, match="write a local index"):
        load_data("https://somewhere/train.tar")
    command = {
        "shardlist": [{"url": f"pipe:cat train-{i}.tar", "nsamples": 1} for i in range(3)],
        "class_names": ["cat"],
    }
    (tmp_path / "b" / "index.json").write_text(json.dumps(command))
    with pytest.raises(DataError, match="scheme pipe:, which is not read"):
        load_data(tmp_path / "b" / "index.json")

    for number in range(3):
        write_shard(tmp_path / "c" / f"train-{number}.tar", 9 * number, 9)
    (tmp_path / "c" / "classnames.txt").write_text("cat\ndog\n")
    with pytest.raises(DataError, match=r"label 2 in the shard .*outside the 2 classes"):
        load_data(tmp_path / "c")


def test_corrupt_images_of_a_shard(tmp_path: Path) -> None:
    for number in range(3):
        write_shard(tmp_path / f"train-{number}.tar", 9 * number, 9, broken=[4] if number == 0 else [])
    with pytest.raises(DataError, match=r"cannot decode the image 000004 of the shard .*train-0.tar"):
        list(load_data(tmp_path).train.batches(4))
    splits = load_data(tmp_path, on_corrupt="skip")
    assert index(list(splits.train.batches(4))) == [0, 1, 2, 3, 5, 6, 7, 8]
    assert isinstance(splits.train, ShardImages)
    assert len(splits.train.skipped) == 1
