"""Mixed images: every pixel comes from the two images in the share that the labels get."""

import pytest
import torch

from attnrx.data import Batch
from attnrx.support.errors import InvalidInput
from attnrx.training import Mixing

SEEDS = range(40)


def batch(count: int = 4) -> Batch:
    """Image i is all i, so that a pixel tells where it is from."""
    values = torch.arange(count).float()
    return Batch(values[:, None, None, None].expand(count, 3, 12, 20).clone(), torch.arange(count), torch.arange(count))


def test_mixup_blends_every_pixel_by_the_share() -> None:
    given = batch()
    shares = set()
    for seed in SEEDS:
        mixed = Mixing(mixup=0.8, cutmix=0.0).apply(given, seed)
        assert mixed.partners is not None
        assert mixed.partners.tolist() == [3, 2, 1, 0]
        expected = mixed.share * given.labels + (1 - mixed.share) * mixed.partners
        torch.testing.assert_close(mixed.images, expected.float()[:, None, None, None].expand_as(mixed.images))
        shares.add(mixed.share)
    assert len(shares) == len(SEEDS)


def test_cutmix_pastes_one_rectangle_of_the_share() -> None:
    given, areas = batch(), []
    for seed in SEEDS:
        mixed = Mixing(mixup=0.0, cutmix=1.0).apply(given, seed)
        assert mixed.partners is not None
        own = mixed.images == given.labels[:, None, None, None]
        assert torch.equal(~own, mixed.images == mixed.partners[:, None, None, None])
        assert own.float().mean((1, 2, 3)).tolist() == pytest.approx([mixed.share] * 4)
        pasted = ~own[0, 0]
        rows, columns = pasted.any(1), pasted.any(0)
        assert torch.equal(pasted, rows[:, None] & columns)  # a rectangle
        areas.append(1 - mixed.share)
    assert min(areas) < 0.1
    assert max(areas) > 0.6
    assert torch.equal(given.images, batch().images)


def test_both_are_used_and_some_batches_stay_as_they_are() -> None:
    given = batch()
    made = [Mixing(chance=0.7).apply(given, seed) for seed in SEEDS]
    untouched = [mixed for mixed in made if mixed.partners is None]
    assert all(torch.equal(mixed.images, given.images) and mixed.share == 1 for mixed in untouched)
    pasted = [mixed for mixed in made if mixed.partners is not None and bool((mixed.images % 1 == 0).all())]
    assert 0 < len(untouched) < len(SEEDS) / 2
    assert 0 < len(pasted) < len(SEEDS) - len(untouched)


def test_the_same_seed_mixes_in_the_same_way() -> None:
    first, second = (Mixing().apply(batch(), 5) for _ in range(2))
    assert torch.equal(first.images, second.images)
    assert first.share == second.share


@pytest.mark.parametrize("knobs", [{"mixup": -1.0}, {"mixup": 0.0, "cutmix": 0.0}, {"chance": 0.0}, {"chance": 1.5}])
def test_mixing_nothing_is_refused(knobs: dict) -> None:
    with pytest.raises(InvalidInput):
        Mixing(**knobs)
