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
from attnrx.models import family_of
from attnrx.planning.clock import _Timer, timed_prices
from attnrx.planning.fitting import never_slower, never_slower_mlp
from attnrx.planning.pinning import STAGES, _everywhere, _saving, _some_at, pinned
from attnrx.planning.prices import Prices, counted_prices
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
    found = never_slower(noisy, space)
    assert np.abs(found - truth).mean() < 0.75 * np.abs(noisy - truth).mean()
    for axis in (0, 1):
        assert (np.diff(found, axis=axis) <= 1e-12).all()
    assert np.abs(never_slower(truth, space) - truth).max() < 1e-9
    slower = never_slower(2 - truth, space)  # the lower, the slower: nothing is saved
    assert np.ptp(slower) < 1e-9 and slower.mean() == pytest.approx((2 - truth).mean())
    alone = never_slower(noisy[:, :1], replace(space, axes=("scores",), reducer=None, _pieces={}))
    assert (np.diff(alone, axis=0) <= 1e-12).all()
    saved = -0.03 * levels[:, None] + 0.005 * random.standard_normal((len(levels), 1))
    mlp = never_slower_mlp(saved, space)
    assert mlp[0] == 0 and (np.diff(mlp, axis=0) <= 1e-12).all() and np.abs(mlp - saved).max() < 0.02


def test_prices_are_pinned_to_whole_models(space: Space) -> None:
    even = replace(space, form="uniform_rank", _pieces={})
    prices, tokens = counted_prices(even, "macs"), np.arange(17)
    factors = {"scores": 0.5, "values": 0.75, "mlp": 1.25}
    slower = replace(prices, whole=prices.whole / 1.25, stages=prices.stages + 0.01 * prices.whole * tokens / 16)
    truth = _saving(slower, factors)
    nothing, some = Choices.nothing(3), Choices((0,) * 3, (0,) * 3, (0,) * 3, (0, 4, 4))
    chosen = {
        "own": nothing,
        **{axis: _everywhere(even, axis) for axis in RANKS},
        **{str(stages): _some_at(even, stages) for stages in STAGES},
    }
    asked: list[tuple[str, ...]] = []

    def clock(models: Mapping[str, nn.Module], known: Prices = truth) -> dict[str, float]:
        asked.append(tuple(models))
        return {name: known.total(chosen[name]) for name in models}

    found = pinned(prices, even, clock)
    assert asked == [("own", *RANKS, "1", "3", "None")]  # in one run
    assert found.total(nothing) == pytest.approx(1.25) and found.total(some) == pytest.approx(truth.total(some))
    for axis, factor in factors.items():
        cut = some.with_level(axis, 0, 4)
        saved = prices.total(some) - prices.total(cut)
        assert found.total(some) - found.total(cut) == pytest.approx(1.25 * factor * saved)
    both = some.with_level("scores", 0, 4).with_level("values", 0, 2)
    assert found.total(both) == pytest.approx(truth.total(both))
    # What is faster than its layers costs nothing beside them.
    free = pinned(prices, even, partial(clock, known=replace(slower, stages=prices.stages - 0.01 * prices.whole)))
    assert free.total(some) == pytest.approx(1.25 * prices.total(some))
    ranks = pinned(prices, replace(even, axes=RANKS, reducer=None, _pieces={}), clock)
    assert asked[-1] == ("own", *RANKS) and (ranks.stages == prices.stages).all()


def test_an_axis_that_saves_nothing_on_the_clock_has_no_price(space: Space) -> None:
    prices = counted_prices(space, "macs")
    found = pinned(prices, space, lambda models: dict.fromkeys(models, 1.0))
    for axis in RANKS:
        assert found.total(_everywhere(space, axis)) == pytest.approx(1)
