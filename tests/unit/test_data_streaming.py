"""Splits that are decoded on the way."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attnrx.data import Batch, ImageSet, LoadedImages, Splits, images, load_data
from support.pictures import rows, write_folder, write_parquet


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of tables go to a folder of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def photographs(tmp_path: Path) -> Splits:
    """Pictures of 130x100, large enough to be taken for photographs, at a model's size of 16."""
    return load_data(
        write_parquet(tmp_path / "pets.parquet", rows(40, size=(130, 100)) + rows(9, "test")), image_size=16
    )


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
    assert isinstance(photographs.train, LoadedImages) and not photographs.train.is_held
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


def test_a_set_too_large_for_memory_streams_the_same_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(tmp_path / "small.parquet", rows(40) + rows(6, "test"))
    in_memory = load_data(path)
    held = passes(in_memory.train, in_memory), list(in_memory.test.take(4).batches(3))
    monkeypatch.setattr(images, "IN_MEMORY", 1000)
    monkeypatch.setenv("ATTNRX_CACHE", str(tmp_path / "other"))
    streamed = load_data(path)
    assert isinstance(streamed.train, LoadedImages) and not streamed.train.is_held
    assert equal(passes(streamed.train, streamed), held[0])
    assert equal(list(streamed.test.take(4).batches(3)), held[1])


def test_only_images_that_are_used_are_decoded(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "pets", {"train": 20, "test": 2})
    loaded, read = load_data(root).train, list[int]()
    assert isinstance(loaded, LoadedImages)
    content = loaded.store.content
    images = replace(loaded, store=replace(loaded.store, content=lambda row: read.append(row) or content(row)))
    few = images.take(6)
    before = list(few.batches(6))
    assert len(read) == 6
    assert equal(list(few.batches(6)), before) and len(read) == 6, "decoded once"
    assert len(list(images.batches(6))) and len(read) == 6 + len(images)
