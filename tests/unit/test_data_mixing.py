"""Images of two datasets in turns: the laws of a pass hold, small images become tiles, and labels are refused."""

import math

import pytest
import torch

import attnrx as rx
from attnrx.data import Batch, ImageSet, Normalization, Splits, from_tensors, mix_data, require_labels
from attnrx.data.mixing import MixedImages, Mosaics
from attnrx.support.errors import DataError, InvalidInput

HALF = Normalization.half(3)


def coloured(name: str, count: int, size: int) -> ImageSet:
    """Returns images of one colour each, which is their number."""
    pixels = torch.arange(count, dtype=torch.uint8)[:, None, None, None].expand(-1, 3, size, size)
    return from_tensors(name, pixels.clone(), torch.arange(count) % 4, HALF)


def splits(name: str, count: int, size: int) -> Splits:
    train, test = coloured(name, count, size), coloured(name, 8, size)
    return Splits(name, train, test, test, ("a", "b", "c", "d"), 3, size, HALF, None)


def joined(batches: list[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat([batch.images for batch in batches]), torch.cat([batch.index for batch in batches])


@pytest.fixture(params=["mosaics", "mixed", "mixed 1:3"])
def images(request: pytest.FixtureRequest) -> ImageSet:
    mosaics = Mosaics(coloured("small", 85, 4), 2, 8)  # 21 mosaics, one image is left
    if request.param == "mosaics":
        return mosaics
    return (
        MixedImages(coloured("large", 22, 8), mosaics)
        if request.param == "mixed"
        else MixedImages(coloured("large", 7, 8), mosaics, 3)
    )


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize(("size", "start"), [(8, 0), (8, 1), (3, 1), (3, 2), (1, 3)])
def test_starting_at_a_step_is_leaving_out_what_came_before(
    images: ImageSet, seed: int | None, size: int, start: int
) -> None:
    whole, rest = list(images.batches(size, seed=seed)), list(images.batches(size, seed=seed, start=start))
    steps = len(images) // size + (seed is None and len(images) % size > 0)
    # A shuffled pass over both sets ends with the shorter one, and with whole turns.
    is_shorter = seed is not None and isinstance(images, MixedImages)
    assert len(rest) == len(whole) - start
    assert steps - 3 <= len(whole) <= steps if is_shorter else len(whole) == steps
    for mine, other in zip(joined(rest), joined(whole[start:]), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("processes", [2, 4])
def test_processes_together_see_what_one_sees(images: ImageSet, seed: int | None, processes: int) -> None:
    alone = list(images.batches(8, seed=seed))
    shares = [list(images.batches(8, seed=seed, shard=(process, processes))) for process in range(processes)]
    together = [batch for step in range(len(alone)) for share in shares for batch in share[step : step + 1]]
    for mine, other in zip(joined(together), joined(alone), strict=True):
        assert torch.equal(mine, other)


def test_a_mosaic_does_not_depend_on_the_number_of_processes() -> None:
    """Of random pixels: the interpolation overshoots, and what is cut may not depend on the share of a process."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (24, 3, 4, 4), generator=generator, dtype=torch.uint8)
    pixels[torch.arange(24) % 6 < 3] //= 4  # the mosaics of the first process are dark
    images = Mosaics(from_tensors("random", pixels, torch.arange(24) % 4, HALF), 2, 12)
    (alone,) = images.batches(6)
    together = [batch.images for process in range(2) for batch in images.batches(6, shard=(process, 2))]
    torch.testing.assert_close(torch.cat(together), alone.images, rtol=0, atol=0)


def test_an_ordered_pass_has_every_image_once_and_no_label(images: ImageSet) -> None:
    batches = list(images.batches(8))
    pixels, _ = joined(batches)
    assert len(pixels) == len(images) == len({tuple(each.flatten().tolist()) for each in pixels})
    assert all((batch.labels == -1).all() for batch in batches) and not images.has_labels
    assert images.fingerprint != images.take(10).fingerprint and len(images.take(10)) == 10
    parts = [images.part(process, 2, 8) for process in range(2)]
    assert torch.equal(joined([batch for part in parts for batch in part.batches(8)])[0], pixels)


def test_small_images_are_tiles_of_images_far_from_each_other() -> None:
    (batch,) = Mosaics(coloured("small", 12, 4), 2, 8).batches(4)
    assert batch.images.shape == (3, 3, 8, 8)
    corners = ((batch.images[1, 0, [0, 0, 7, 7], [0, 7, 0, 7]] + 1) * 127.5).round()
    assert corners.tolist() == [1, 4, 7, 10]
    # 3 tiles on 8 pixels: the last row and column of tiles are cut.
    (batch,) = Mosaics(coloured("small", 9, 4), 3, 8).batches(4)
    assert batch.images.shape == (1, 3, 8, 8)


@pytest.mark.parametrize(("size", "tiles"), [(8, 1), (5, 1), (4, 1), (3, 2), (2, 2), (1, 4)])
def test_images_are_enlarged_at_most_twice(size: int, tiles: int) -> None:
    mixed = mix_data(splits("large", 8, 8), splits("small", 64, size))
    assert isinstance(mixed.train, MixedImages) and isinstance(mixed.train.others, Mosaics)
    assert mixed.train.others.tiles == tiles
    assert next(mixed.train.batches(2)).images.shape == (2, 3, 8, 8)


def test_both_datasets_have_as_many_images_on_one_scale() -> None:
    others = splits("small", 20, 4).renormalized(Normalization((0.0,) * 3, (1.0,) * 3))
    mixed = mix_data(splits("large", 30, 8), others)
    assert len(mixed.train) == 40 and "20 of large and 20 of small" in mixed.notes[-1]
    images = next(mixed.train.batches(40)).images
    assert torch.equal(images[::2].amin(), images[1::2].amin()), "zero is black in both"
    assert mixed.test is not mixed.train and mixed.test.has_labels
    with pytest.raises(DataError, match="no labels"):
        require_labels(mixed.train)


@pytest.mark.parametrize("size", [1, 3, 4, 6, 8])
def test_every_image_is_followed_by_those_of_the_other_data(size: int) -> None:
    mixed = mix_data(splits("large", 30, 8), splits("small", 40, 2), times=3)
    assert isinstance(mixed.train, MixedImages) and len(mixed.train) == 12 and "3 of large and 9" in mixed.notes[-1]
    images, index = joined(list(mixed.train.batches(size)))
    own = joined(list(mixed.train.own.batches(size)))
    assert torch.equal(images[::4], own[0]) and torch.equal(index[::4], own[1])
    # As many turns at once as make whole batches; mosaics depend on the size of a batch.
    turns = size * (4 // math.gcd(4, size)) // 4
    others = joined(list(mixed.train.others.batches(3 * turns)))[0]
    assert torch.equal(images[torch.arange(12) % 4 > 0], others)
    few = mixed.train.take(6)
    assert isinstance(few, MixedImages) and (len(few.own), len(few.others)) == (2, 4)


@pytest.mark.parametrize("times", [0, -1])
def test_the_number_of_other_images_is_positive(times: int) -> None:
    with pytest.raises(InvalidInput, match="positive whole number"):
        mix_data(splits("large", 8, 8), splits("small", 64, 4), times)


@pytest.mark.parametrize(
    ("others", "problem"),
    [
        (splits("big", 4, 16), "image_size=8"),
        (splits("few", 3, 2), "at least 4"),
    ],
)
def test_what_cannot_be_mixed_is_refused(others: Splits, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        mix_data(splits("large", 8, 8), others)


def test_other_channels_are_refused() -> None:
    grey = rx.load_data("digits")
    with pytest.raises(DataError, match="channels"):
        mix_data(splits("large", 8, 8), grey)
