"""Splits that are decoded on the way, and tar shards."""

from pathlib import Path

import pytest
import torch

from attnrx.data import Batch, ImageSet, Normalization, Splits, load_data
from attnrx.data import loading as loading_module
from attnrx.data.loaded_images import MemoryImages, StreamedImages
from attnrx.support.errors import DataError
from support.pictures import CLASSES, everything, rows, sizes, write_folder, write_parquet, write_shard


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


def written_shards(tmp_path: Path) -> Splits:
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


@pytest.mark.parametrize("in_memory", [True, False])
def test_shards_are_read_as_other_files_are(tmp_path: Path, in_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not in_memory:
        monkeypatch.setattr(loading_module, "IN_MEMORY", 1000)
    splits = written_shards(tmp_path)
    assert isinstance(splits.train, MemoryImages if in_memory else StreamedImages)
    assert sizes(splits) == (39, 6, 12)
    assert splits.class_names == ("0", "1", "2")
    assert any("no validation split: 6 training images" in note for note in splits.notes)
    for split in ("train", "validation", "test"):
        pixels, labels, source = everything(splits, split)
        assert torch.equal(labels, source % 3)
        assert torch.equal(pixels[:, 1, 0, 0].long(), source), "the picture belongs to its label"
    whole = passes(splits.train, splits)
    assert equal(passes(splits.train, splits, start=5), whole[5:])
    halves = [passes(splits.train, splits, shard=(process, 2)) for process in (0, 1)]
    assert [row for pair in zip(*halves, strict=True) for row in index(list(pair))] == index(whole)


@pytest.mark.parametrize("processes", [1, 2, 3, 9])
def test_parts_are_whole_batches_of_a_pass(processes: int, photographs: Splits) -> None:
    images = photographs.train
    parts = [images.part(process, processes, 4) for process in range(processes)]
    batches = [batch for part in parts if len(part) for batch in part.batches(4)]
    assert equal(batches, list(images.batches(4)))
    assert all(list(part.batches(4)) == [] for part in parts if not len(part))


def test_patterns_and_names_of_shards(tmp_path: Path) -> None:
    for number in range(4):
        write_shard(tmp_path / f"part-{number:02d}.tar", 9 * number, 9)
    (tmp_path / "classnames.txt").write_text("\n".join(CLASSES) + "\n")
    splits = load_data(str(tmp_path / "part-{00..03}.tar"))
    assert sum(sizes(splits)) == 36 and splits.class_names == CLASSES
    (tmp_path / "classnames.txt").write_text("\n".join(CLASSES))  # without a final newline
    again = load_data(str(tmp_path / "part-0{0,1,2,3}*.tar"))
    assert sizes(again) == sizes(splits) and again.class_names == CLASSES
    (tmp_path / "classnames.txt").write_text("\n".join(reversed(CLASSES)))
    assert load_data(str(tmp_path / "part-*.tar")).class_names == CLASSES[::-1]
    with pytest.raises(DataError, match=r"part-04.tar does not exist"):
        load_data(str(tmp_path / "part-{00..04}.tar"))


def test_what_can_be_wrong_with_shards(tmp_path: Path) -> None:
    for number in range(3):
        write_shard(tmp_path / "b" / f"train-{number}.tar", 0, 9)
    whole = tmp_path / "b" / "train-1.tar"
    whole.write_bytes(whole.read_bytes()[:3000])
    with pytest.raises(DataError, match=r"train-1.tar is not a whole tar file"):
        load_data(tmp_path / "b")
    with pytest.raises(DataError, match="is remote"):
        load_data("https://somewhere/train.tar")
    write_shard(tmp_path / "c" / "train-0.tar", 0, 9)
    (tmp_path / "c" / "classnames.txt").write_text("cat\ndog\n")
    with pytest.raises(DataError, match=r"label 2 of image 2 .*outside the 2 classes"):
        load_data(tmp_path / "c")


def test_corrupt_images_of_a_shard(tmp_path: Path) -> None:
    for split in ("train", "val", "test"):
        write_shard(tmp_path / f"{split}.tar", 0, 9, broken=[4] if split == "train" else [], size=(130, 100))
    with pytest.raises(DataError, match=r"cannot decode the image 000004 of the shard .*train.tar"):
        list(load_data(tmp_path, image_size=16).train.batches(4))
    splits = load_data(tmp_path, image_size=16, on_corrupt="skip")
    assert index(list(splits.train.batches(4))) == [0, 1, 2, 3, 5, 6, 7, 8]
    assert isinstance(splits.train, StreamedImages)
    assert len(splits.train.skipped) == 1
