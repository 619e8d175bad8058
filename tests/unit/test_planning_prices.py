"""Prices of plans: what the realized model costs, in closed form or by the clock."""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

import planned
from attnrx.attention import Attention, Tapped
from attnrx.models import family_of, reduction_of
from attnrx.planning.clock import _never_slower, _never_slower_mlp, _Timer, pinned, timed_prices
from attnrx.planning.prices import counted_prices
from attnrx.planning.space import RANKS, Choices, Space
from planned import CLOCK, made


@pytest.fixture(scope="module")
def space() -> Space:
    return planned.spanned()


CHOICES = [
    Choices((2, 0, 4), (0, 0, 0), (0, 0, 0), (0, 0, 0)),
    Choices((0, 0, 0), (0, 3, 6), (0, 0, 0), (0, 0, 0)),
    Choices((0, 0, 0), (0, 0, 0), (5, 0, 6), (0, 0, 0)),
    Choices((0, 0, 0), (0, 0, 0), (0, 0, 0), (0, 6, 4)),
    Choices((6, 1, 2), (0, 4, 0), (0, 6, 5), (0, 2, 6)),
]


@pytest.mark.parametrize("choices", CHOICES)
@pytest.mark.parametrize("of", ["macs", "params"])
@pytest.mark.parametrize("form", ["total_rank", "uniform_rank"])
def test_the_price_is_what_the_realized_model_costs(space: Space, choices: Choices, of: str, form: str) -> None:
    own = replace(space, form=form, _pieces={})
    family = family_of(space.model)
    share = getattr(family.costs(made(own, choices)), of) / getattr(family.costs(space.model), of)
    assert counted_prices(own, of).total(choices) == pytest.approx(share, rel=1e-12)


def test_the_price_of_nothing_is_the_whole(space: Space) -> None:
    for of in ("macs", "params"):
        assert counted_prices(space, of).total(Choices.nothing(3)) == pytest.approx(1, abs=1e-12)


def test_the_clock_prices_blocks_by_their_tokens(space: Space) -> None:
    prices = timed_prices(replace(space, form="uniform_rank", _pieces={}), CLOCK, lambda told: None)
    assert prices.total(Choices.nothing(3)) > 0
    one = prices.attention[0, 0, 0]
    assert one[-1] > 0 and one[0] == 0 and (np.diff(one[[0, -1]]) > 0).all()
    for table in (prices.attention[0, :, 0, -1], prices.attention[0, 0, :, -1], prices.mlp[0, :, -1]):
        known = [value for level, value in enumerate(table) if level == 0 or value]
        assert all(after <= before + 1e-12 for before, after in itertools.pairwise(known))


def test_a_block_is_timed_as_it_runs_after_a_stage(space: Space) -> None:
    timer = _Timer(space, CLOCK, [8, 17])
    after, before = timer._place_after_stage(space.model, 2), timer._place(space.model, 2)
    assert isinstance(after, nn.Module) and isinstance(before, nn.Module)
    tokens = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    with torch.inference_mode():
        assert_close(after(tokens), before(tokens))  # every size is 1
    backends = [own.backend for own in after.modules() if isinstance(own, Attention)]
    assert [type(own) for own in backends] == [Tapped]
    assert not _Timer(replace(space, axes=RANKS, reducer=None, _pieces={}), CLOCK, [8, 17]).leaves


def test_no_lower_level_is_slower_and_many_times_quiet_the_clock(space: Space) -> None:
    random, levels = np.random.default_rng(0), np.arange(len(space.levels))
    own, other = np.meshgrid(levels, levels, indexing="ij")
    # Fused kernels pad the narrower side: what both have saved counts once more.
    truth = (1 - 0.02 * own - 0.01 * other - 0.03 * np.minimum(own, other))[..., None]
    noisy = truth + 0.02 * random.standard_normal(truth.shape)
    found = _never_slower(noisy, space)
    assert np.abs(found - truth).mean() < 0.75 * np.abs(noisy - truth).mean()
    for axis in (0, 1):
        assert (np.diff(found, axis=axis) <= 1e-12).all()
    assert np.abs(_never_slower(truth, space) - truth).max() < 1e-9
    slower = _never_slower(2 - truth, space)  # the lower, the slower: nothing is saved
    assert np.ptp(slower) < 1e-9 and slower.mean() == pytest.approx((2 - truth).mean())
    alone = _never_slower(noisy[:, :1], replace(space, axes=("scores",), reducer=None, _pieces={}))
    assert (np.diff(alone, axis=0) <= 1e-12).all()
    saved = -0.03 * levels[:, None] + 0.005 * random.standard_normal((len(levels), 1))
    mlp = _never_slower_mlp(saved, space)
    assert mlp[0] == 0 and (np.diff(mlp, axis=0) <= 1e-12).all() and np.abs(mlp - saved).max() < 0.02


def test_prices_are_pinned_to_whole_models(space: Space) -> None:
    even = replace(space, form="uniform_rank", _pieces={})
    prices, tokens = counted_prices(even, "macs"), np.arange(17)
    truth = replace(prices, whole=prices.whole / 1.25, stages=prices.stages + 0.01 * prices.whole * tokens / 16)
    nothing, some = Choices.nothing(3), Choices((0,) * 3, (0,) * 3, (0,) * 3, (0, 4, 4))
    asked: list[tuple[str, ...]] = []

    def clock(models: Mapping[str, nn.Module], stage: float = 1.0) -> dict[str, float]:
        asked.append(tuple(models))
        known = replace(truth, stages=truth.stages * stage)
        return {name: known.total(_letting_go(even, model)) for name, model in models.items()}

    found = pinned(prices, even, clock)
    assert asked == [("own", "1", "3", "None")]  # in one run
    assert found.total(nothing) == pytest.approx(1.25) and found.total(some) == pytest.approx(truth.total(some))
    cut = some.with_level("scores", 0, 4)
    saved = prices.total(some) - prices.total(cut)
    assert found.total(some) - found.total(cut) == pytest.approx(1.25 * saved)
    # What is faster than its layers costs nothing beside them.
    free = pinned(prices, even, partial(clock, stage=-1.0))
    assert free.total(some) == pytest.approx(1.25 * prices.total(some))
    ranks = pinned(prices, replace(even, axes=RANKS, reducer=None, _pieces={}), clock)
    assert asked[-1] == ("own",) and (ranks.stages == prices.stages).all()


def _letting_go(space: Space, model: nn.Module) -> Choices:
    """Reads off a model how many patches leave before every layer."""
    found, reduction = Choices.nothing(space.depth), reduction_of(model)
    left = space.patches
    if reduction is not None:
        for layer, count in zip(reduction.policy.layers, reduction.policy.counts(space.patches), strict=True):
            found, left = found.with_leaving(layer - 1, left - count), count
    return found
