"""Passes over a split: exact resume, processes that share a batch, and prefixes and shares that are balanced."""

from dataclasses import replace

import pytest
import torch

from attnrx.data import Augmentation, Batch, LoadedImages, Normalization, from_tensors
from attnrx.data.images import hold_out
from attnrx.support.errors import DataError, InvalidInput

COUNT = 53
AUGMENTATION = Augmentation(padding=2)


@pytest.fixture
def images() -> LoadedImages:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (COUNT, 1, 6, 6), generator=generator, dtype=torch.uint8)
    images = from_tensors("made/train", pixels, torch.arange(COUNT) % 4, Normalization.half(1))
    return replace(images, store=replace(images.store, sources=torch.arange(COUNT) + 1000))


def same(left: list[Batch], right: list[Batch]) -> bool:
    return len(left) == len(right) and all(
        torch.equal(a.images, b.images) and torch.equal(a.labels, b.labels) and torch.equal(a.index, b.index)
        for a, b in zip(left, right, strict=True)
    )


def joined(parts: list[Batch]) -> Batch:
    return Batch(
        torch.cat([part.images for part in parts]),
        torch.cat([part.labels for part in parts]),
        torch.cat([part.index for part in parts]),
    )


def test_an_ordered_pass_shows_every_image_once(images: LoadedImages) -> None:
    batches = list(images.batches(8))
    assert [len(batch) for batch in batches] == [8] * 6 + [5]
    assert torch.equal(joined(batches).index, torch.arange(COUNT) + 1000)


def test_a_shuffled_pass_shows_whole_batches_of_different_images(images: LoadedImages) -> None:
    batches = list(images.batches(8, seed=3))
    assert [len(batch) for batch in batches] == [8] * 6
    seen = joined(batches).index
    assert len(seen.unique()) == 48
    assert not torch.equal(seen, seen.sort().values)


def test_the_seed_decides_order_and_crops(images: LoadedImages) -> None:
    first, again, other = (list(images.batches(8, seed=seed, augmentation=AUGMENTATION)) for seed in (3, 3, 4))
    assert same(first, again)
    assert not torch.equal(joined(first).index, joined(other).index)


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("start", [0, 1, 4, 6])
def test_starting_at_a_step_is_leaving_out_what_came_before(images: LoadedImages, seed: int | None, start: int) -> None:
    augmentation = AUGMENTATION if seed is not None else None
    whole = list(images.batches(8, seed=seed, augmentation=augmentation))
    assert same(list(images.batches(8, seed=seed, augmentation=augmentation, start=start)), whole[start:])


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("seed", [None, 3])
def test_processes_together_see_what_one_sees(images: LoadedImages, seed: int | None, processes: int) -> None:
    augmentation = AUGMENTATION if seed is not None else None
    alone = list(images.batches(8, seed=seed, augmentation=augmentation))
    shares = [
        list(images.batches(8, seed=seed, augmentation=augmentation, shard=(process, processes)))
        for process in range(processes)
    ]
    together = [joined([share[step] for share in shares if step < len(share)]) for step in range(len(alone))]
    assert same(together, alone)
    assert all(len(share[0]) == 8 // processes for share in shares)


def test_what_cannot_be_meant_is_refused(images: LoadedImages) -> None:
    with pytest.raises(InvalidInput, match="multiple of their number"):
        images.batches(9, shard=(0, 2))
    with pytest.raises(InvalidInput, match="processes"):
        images.batches(8, shard=(2, 2))
    with pytest.raises(InvalidInput, match="without a seed"):
        images.batches(8, augmentation=AUGMENTATION)
    with pytest.raises(DataError, match="whole batches of 64"):
        next(images.batches(64, seed=0))
    with pytest.raises(DataError, match="has 6 steps"):
        next(images.batches(8, seed=0, start=7))
    with pytest.raises(DataError, match="ask for 1 to 53"):
        images.take(54)


def test_taking_goes_round_the_classes(images: LoadedImages) -> None:
    by_class = torch.arange(COUNT).sort(stable=True).values.tolist()
    by_class.sort(key=lambda position: position % 4)
    sorted_images = replace(images, name="made/sorted", rows=torch.tensor(by_class))
    taken = next(sorted_images.take(10).batches(16))
    assert taken.labels.bincount().tolist() == [3, 3, 2, 2]
    assert len(taken.index.unique()) == 10
    assert torch.equal(next(sorted_images.take(4).batches(4)).index, taken.index[:4])


def test_fingerprints_tell_content_apart(images: LoadedImages) -> None:
    pixels, labels = images.store.pixels, images.store.labels
    assert pixels is not None
    changed = pixels.clone()
    changed[0, 0, 0, 0] += 1
    others = [
        images.take(20),
        from_tensors("made/train", changed, labels, images.normalization),
        from_tensors("made/train", pixels, labels.flip(0), images.normalization),
    ]
    assert len({images.fingerprint, *(other.fingerprint for other in others)}) == 4
    assert images.fingerprint == images.renormalized(Normalization((0.1,), (0.2,))).fingerprint


def test_held_out_is_the_same_share_of_every_class_and_stable() -> None:
    labels = torch.tensor([0] * 50 + [1] * 20 + [2] * 2 + [3])
    keys = [f"image {i}" for i in range(len(labels))]
    marked = hold_out(labels, keys, 0.1, seed=0)
    assert labels[marked].bincount(minlength=4).tolist() == [5, 2, 1, 0]
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    shuffled = hold_out(labels[order], [keys[i] for i in order], 0.1, seed=0)
    assert torch.equal(shuffled, marked[order]), "a hash of the key decides, not the place in the list"
    assert not torch.equal(hold_out(labels, keys, 0.1, seed=1), marked)
