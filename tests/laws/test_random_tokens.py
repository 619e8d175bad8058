"""The random control: an image's tokens follow from its pixels, however it is batched, ordered or computed."""

import copy
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from torch import nn

from attnrx.support.errors import InvalidInput
from attnrx.vit.models import attach_tokens_, family_of, token_run
from attnrx.vit.models.boundary.adoption import adopt
from attnrx.vit.tokens import TokenPolicy, TokenState
from attnrx_lab.tokens import Random, image_keys
from attnrx_lab.tokens.random import scrambled
from support.pretrained import TIMM, VIT, timm

COUNT = 50
POLICY = TokenPolicy.staged(Random(seed=3), 0.7, (2, 3))


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@cache
def original() -> nn.Module:
    """196 patches, as in ViT-Tiny, of 96 features: on one thread a batch of 50 passes in two parts."""
    torch.manual_seed(0)
    shape = {"depth": 3, "embed_dim": 96, "img_size": 112, "patch_size": 8, "num_classes": 10}
    return adopt(TIMM, timm.create_model(VIT, **shape).eval())


@cache
def pictures() -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.rand(COUNT, 3, 112, 112, generator=generator).mul_(255).round_().div_(127.5).sub_(1)


@cache
def pruned(by: str) -> nn.Module:
    model = copy.deepcopy(original())
    attach_tokens_(model, family_of(model), POLICY, by)
    return model.eval()


def kept_of(model: nn.Module, images: torch.Tensor, batch: int) -> list[torch.Tensor]:
    """Runs the images in batches and returns the patches that are left after each stage, [images, kept], ascending."""
    stages = []
    with torch.no_grad():
        for each in images.split(batch):
            stages.append([stage.sort(1).values for stage in token_run(model, each).trail])
    return [torch.cat(stage) for stage in zip(*stages, strict=True)]


@cache
def expected() -> list[torch.Tensor]:
    return kept_of(pruned("compress"), pictures(), 7)


def require_equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert len(found) == len(wanted) == 2
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("by", ["compress", "mask"])
@pytest.mark.parametrize("batch", [1, 7, COUNT])
def test_random_tokens_depend_on_neither_threads_nor_batches_nor_order(by: str, batch: int, threads: int) -> None:
    order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(batch))[: 10 * batch]
    found = kept_of(pruned(by), pictures()[order], batch)
    require_equal(found, [stage[order] for stage in expected()])


def test_images_have_random_tokens_of_their_own() -> None:
    assert all(len(stage.unique(dim=0)) == COUNT for stage in expected())


def test_identical_images_have_identical_random_tokens() -> None:
    twice = pictures()[:3].repeat(2, 1, 1, 1)
    for stage in kept_of(pruned("compress"), twice, 6):
        assert torch.equal(stage[:3], stage[3:])


@pytest.mark.parametrize("place", [(0, 0, 0), (2, 111, 111), (1, 100, 17)])
def test_one_pixel_changes_the_random_tokens(place: tuple[int, int, int]) -> None:
    changed = pictures()[:1].clone()
    changed[0, *place] += 2 / 255
    assert not torch.equal(kept_of(pruned("compress"), changed, 1)[0], expected()[0][:1])


PATCHES, KEPT = 196, 137


def shares(seed: int, keys: torch.Tensor) -> torch.Tensor:
    """Returns the scores of all patches of images with these keys."""
    count = len(keys)
    tokens, sizes = torch.zeros(count, PATCHES, 1), torch.ones(count, PATCHES)
    seen = TokenState(tokens, 0, sizes, torch.arange(PATCHES).expand(count, -1), image_keys=keys)
    return Random(seed).relevance(seen, nn.Module())


@cache
def keys() -> torch.Tensor:
    """Hashes of 4,000 small images of 256 grey levels."""
    generator = torch.Generator().manual_seed(0)
    return image_keys(torch.randint(0, 256, (4000, 1, 8, 8), generator=generator) / 255)


def kept(scores: torch.Tensor, count: int) -> torch.Tensor:
    patch_indices = scores.argsort(1, descending=True)[:, :count]
    return torch.zeros_like(scores, dtype=torch.bool).scatter(1, patch_indices, True)


def require_uniform(counts: torch.Tensor, share: float, images: int) -> None:
    """The chi-square statistic of counts that should be equal, in standard deviations of it from its mean."""
    freedom = len(counts) - 1
    statistic = ((counts - share * images).square() / (images * share * (1 - share))).sum() * freedom / len(counts)
    assert abs(statistic - freedom) < 4 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_every_patch_is_kept_equally_often(seed: int) -> None:
    require_uniform(kept(shares(seed, keys()), KEPT).double().sum(0), KEPT / PATCHES, len(keys()))


def test_stages_choose_at_random_among_what_is_left() -> None:
    """Of the patches that stage one keeps, each goes on equally often, and pairs do as those of independent draws."""
    scores = shares(0, keys())
    first, second = kept(scores, KEPT), kept(scores, 96)
    assert bool((second <= first).all())
    rates = (second.double().sum(0) / first.sum(0)).sub(96 / KEPT)
    spread = (96 / KEPT * (1 - 96 / KEPT) / (len(keys()) * KEPT / PATCHES)) ** 0.5
    assert float(rates.abs().max()) < 4.5 * spread
    pairs = torch.corrcoef(second.double().T).fill_diagonal_(0.0)
    assert float((pairs + 1 / (PATCHES - 1)).fill_diagonal_(0.0).abs().max()) < 5.5 / len(keys()) ** 0.5


def test_scores_hold_in_32_bit_arithmetic() -> None:
    """Runtimes without 64-bit integers compute the same hashes."""
    numbers = torch.arange(-5, 5) * 123_456_789
    narrow = scrambled(numbers.to(torch.int32))
    assert torch.equal(narrow, scrambled(numbers).to(torch.int32))


@pytest.mark.parametrize("seed", [-1, 2**31])
def test_seeds_that_the_hash_cannot_hold_are_refused(seed: int) -> None:
    with pytest.raises(InvalidInput, match=f"seed={seed}"):
        Random(seed)
