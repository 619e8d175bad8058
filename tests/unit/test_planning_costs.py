"""Cost tables of plans: the costs of the realized model, in closed form or measured."""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

import attnrx as rx
from attnrx.data.model_data import images_for
from attnrx.decide.planning.cost_table import (
    JOINT,
    PER_MAC,
    CostTable,
    bounded,
    corrected,
    exact_cost_table,
    never_slower,
    nonnegative_fit,
    staged_models,
    with_savings,
)
from attnrx.decide.planning.measured_costs import _Timer, file_cost_table
from attnrx.decide.planning.space import RANKS, Choices, Space
from attnrx.exporting import Baseline, parse_format
from attnrx.nouns.target import Target
from attnrx.vit.costs import Conditions
from attnrx.vit.models import family_of
from attnrx_lab.vision_transformer import ViTConfig
from support import cases, planned, pretrained
from support.planned import SETTINGS, made, timed


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
    assert exact_cost_table(own, of).total(choices) == pytest.approx(share, rel=1e-12)


@pytest.mark.slow
def test_the_clock_prices_blocks_by_their_tokens(space: Space) -> None:
    cost_table = timed(replace(space, form="uniform_rank", _pieces={}))
    assert cost_table.total(Choices.nothing(3)) > 0 and 0 <= cost_table.spread < float("inf")
    one = cost_table.attention[0, 0, 0]
    assert one[-1] > 0 and one[0] == 0 and (np.diff(one[[0, -1]]) > 0).all()
    for table in (cost_table.attention[0, :, 0, -1], cost_table.attention[0, 0, :, -1], cost_table.mlp[0, :, -1]):
        known = [value for level, value in enumerate(table) if level == 0 or value]
        assert all(after <= before + 1e-12 for before, after in itertools.pairwise(known))


OF_RUNTIMES = [(None, "openvino"), (pretrained.BEIT, "openvino"), ("eva02_tiny_patch14_224", "onnx")]


@pytest.mark.parametrize(
    ("name", "form"), [(None, "onnx"), *(pytest.param(*each, marks=pytest.mark.slow) for each in OF_RUNTIMES)]
)
@pytest.mark.usefixtures("no_type_checks")  # sizes of a trace are no int
def test_blocks_give_the_same_at_every_number_of_tokens_in_a_runtime(name: str | None, form: str) -> None:
    for library in parse_format(form).libraries:
        pytest.importorskip(library)
    own = planned.spanned()
    if name is not None:  # biases, or rotations, of all patches
        model = rx.load(pretrained.of_timm(name, depth=3)).float()
        own = replace(own, model=model, axes=("tokens",), _pieces={})
    protocol = replace(SETTINGS.protocol, conditions=Conditions(threads=1))
    noise = replace(SETTINGS, batch=7).noise(own.model)  # no number of tokens: torch.export takes equal sizes for one
    timer, eager = _Timer(own, protocol, noise, parse_format(form)), _Timer(own, protocol, noise)
    grid = timer.grid
    layers = range(1, 3)
    for after_stage in (False, True):
        run, expected = (each._prepared(own.model, layers, after_stage=after_stage) for each in (timer, eager))
        for n in grid if after_stage else grid[-1:]:
            rows = timer.rows[n]
            with torch.inference_mode():
                (found,) = run(rows)
                assert_close(found, expected(rows), atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.slow
def test_a_table_of_a_runtime_has_every_level(space: Space) -> None:
    pytest.importorskip("onnxscript")
    units = replace(space, axes=("mlp",), reducer=None, _pieces={})
    images = images_for(units.model, torch.randn(8, *SETTINGS.noise(units.model).shape[1:]), "images")
    baseline = Baseline.as_file(units.model, parse_format("onnx"), images, lambda _: None)
    timing, exact = (SETTINGS.protocol, SETTINGS.noise(units.model)), exact_cost_table(units, "macs")
    table = file_cost_table(units, *timing, parse_format("onnx"), baseline, exact)
    assert table.total(Choices.nothing(3)) == pytest.approx(1.0) and table.attention[0, 0, 0, -1] > 0
    assert (np.diff(table.mlp[0, :, -1]) <= 1e-12).all()


@pytest.mark.slow
def test_parts_of_a_batch_are_timed_in_8_bits(space: Space) -> None:
    for library in ("openvino", "nncf"):
        pytest.importorskip(library)
    settings = replace(SETTINGS, batch=4)
    timer = _Timer(space, settings.protocol, settings.noise(space.model), parse_format("openvino(precision=int8)"))
    assert timer.block({})[-1] > 0


OTHERS = [
    pytest.param(f"{name}_224", marks=pytest.mark.slow) for name in ("eva02_tiny_patch14", "vit_base_patch16_siglip")
]


@pytest.mark.parametrize("name", [pretrained.BEIT, *OTHERS])
def test_blocks_of_two_layers_with_positions_are_timed_after_a_stage(name: str) -> None:
    model = rx.load(pretrained.of_timm(name, depth=2)).float()  # biases, or rotations, of all patches
    diagnosis = rx.diagnose(model, pretrained.inputs(model, 6).float(), moments=True)
    space = Space.of(model, diagnosis, Target.parse("faster=1.1"), SETTINGS)
    table = timed(space, (4,))
    assert table.patches == space.patches and table.total(Choices.nothing(2)) == pytest.approx(1.0)
    assert table.attention[0, 0, 0, 1] > 0


@pytest.mark.parametrize(
    ("head_dim", "device", "target", "multiple"),
    [(64, "cuda", "macs=0.6x", 8), (96, "cuda", "macs=0.6x", 8), (32, "cuda", "macs=0.6x", 4),
     (96, "cuda", "faster=1.1", 8), (96, "cpu", "faster=1.1", 12), (96, "cpu", "macs=0.6x", 1)],
)  # fmt: skip
def test_ranks_are_multiples_of_8_on_cuda(
    head_dim: int, device: str, target: str, multiple: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Conditions, "on_cuda", device == "cuda")  # "cuda" is refused where there is none
    config = ViTConfig.uniform("dense", width=2 * head_dim, depth=1, heads=2, **cases.TINY)
    model = cases.model(config)
    diagnosis = rx.diagnose(model, cases.pixels(config, 8), moments=True)
    settings = replace(SETTINGS, axes=("qk", "vo"))
    space = Space.of(model, diagnosis, Target.parse(target), settings)
    assert space.multiple == multiple
    for level in range(1, len(space.levels)):
        ranks = rx.prescribe(diagnosis, {"qk": space.rule("qk", level)}).ranks
        assert all(rank % multiple == 0 and rank for layer in ranks for rank in layer)


@pytest.mark.parametrize(
    ("to", "target", "form"),
    [
        ("openvino(precision=bf16)", "faster=1.1", "uniform_rank"),
        ("openvino(precision=bf16)", "macs=0.6x", "uniform_rank"),
        ("openvino", "faster=1.1", "total_rank"),
        (None, "faster=1.1", "total_rank"),
    ],
)
def test_heads_have_equal_ranks_where_others_are_slower(to: str | None, target: str, form: str) -> None:
    config = ViTConfig.uniform("dense", width=64, depth=1, heads=2, **cases.TINY)
    diagnosis = rx.diagnose(model := cases.model(config), cases.pixels(config, 8), moments=True)
    settings = replace(SETTINGS, axes=("qk", "vo"), to=to)
    assert Space.of(model, diagnosis, Target.parse(target), settings).form == form


def test_no_lower_level_is_slower_and_many_times_quiet_the_clock(space: Space) -> None:
    random, levels = np.random.default_rng(0), np.arange(len(space.levels))
    own, other = np.meshgrid(levels, levels, indexing="ij")
    # Fused kernels pad the narrower side: what both have saved counts once more.
    truth = (1 - 0.02 * own - 0.01 * other - 0.03 * np.minimum(own, other))[..., None]
    noisy = truth + 0.02 * random.standard_normal(truth.shape)
    both = space.available("qk"), space.available("vo")
    found = never_slower(noisy, *both)
    assert np.abs(found - truth).mean() < 0.75 * np.abs(noisy - truth).mean()
    for axis in (0, 1):
        assert (np.diff(found, axis=axis) <= 1e-12).all()
    assert np.abs(never_slower(truth, *both) - truth).max() < 1e-9
    slower = never_slower(2 - truth, *both)  # the lower, the slower: nothing is saved
    assert np.ptp(slower) < 1e-9 and slower.mean() == pytest.approx((2 - truth).mean())
    alone = never_slower(noisy[:, :1], both[0])
    assert (np.diff(alone, axis=0) <= 1e-12).all()
    saved = -0.03 * levels[:, None] + 0.005 * random.standard_normal((len(levels), 1))
    mlp = never_slower(saved[:, None], space.available("mlp"), from_zero=True)[:, 0]
    assert mlp[0] == 0 and (np.diff(mlp, axis=0) <= 1e-12).all() and np.abs(mlp - saved).max() < 0.02


def test_no_block_costs_less_than_half_its_share_of_the_macs(space: Space) -> None:
    macs = exact_cost_table(space, "macs")
    same = bounded(macs, macs)
    assert_close((same.attention, same.mlp), (macs.attention, macs.mlp))
    noisy = with_savings(macs, {"qk": 3.0, "vo": 3.0, "mlp": 3.0})
    few = macs.attention.shape[-1] // 4
    noisy.attention[..., few] -= macs.attention[:, 0, 0, few, None, None]
    found, work, ranks = bounded(noisy, macs), macs.attention[:, 0, 0] + macs.mlp[:, 0], slice(1, None)
    smallest = (found.attention.min((1, 2)) + found.mlp.min(1)) / work
    of_macs = (macs.attention.min((1, 2)) + macs.mlp.min(1)) / work
    assert (noisy.attention.min((1, 2)) + noisy.mlp.min(1))[:, -1].min() < 0
    assert_close(smallest[:, -1], PER_MAC * of_macs[:, -1])
    assert (smallest[:, ranks] >= PER_MAC * PER_MAC * of_macs[:, ranks] - 1e-12).all()
    full = found.attention[:, 0, 0] + found.mlp[:, 0]
    assert_close(full[:, few], PER_MAC * work[:, few])
    assert_close(np.delete(full, few, 1), np.delete(work, few, 1))


def test_a_nonnegative_fit_is_that_of_scipy() -> None:
    optimize = pytest.importorskip("scipy.optimize")
    random = np.random.default_rng(0)
    for rows, columns in ((1, 1), (3, 5), (25, 12), (9, 4), (4, 0)):
        for _ in range(20):
            factors, target = random.integers(0, 2, (rows, columns)).astype(float), random.standard_normal(rows)
            found = nonnegative_fit(factors, target)
            assert (found >= 0).all()
            least = optimize.nnls(factors, target)[1] if columns else np.linalg.norm(target)
            assert np.linalg.norm(factors @ found - target) == pytest.approx(least)


def test_prices_are_pinned_to_whole_models(space: Space) -> None:
    even = replace(space, form="uniform_rank", _pieces={})
    cost_table, tokens = exact_cost_table(even, "macs"), np.arange(17)
    # Of MACs nothing is saved by qk and vo together beyond the sum; a part of the saving of both becomes such a saving.
    attention = cost_table.attention
    beyond = 0.5 * np.minimum(attention[:, :1, :1] - attention[:, :, :1], attention[:, :1, :1] - attention[:, :1])
    cost_table = replace(cost_table, attention=attention - beyond)
    factors = {"qk": 0.5, "vo": 0.75, "mlp": 1.25, JOINT: 0.25}
    slower = replace(
        cost_table, whole=cost_table.whole / 1.25, stages=cost_table.stages + 0.01 * cost_table.whole * tokens / 16
    )
    truth = with_savings(slower, factors)
    nothing, some = Choices.nothing(3), Choices((0,) * 3, (0,) * 3, (0,) * 3, (0, 4, 4))
    halves = {axis: even.uniform(axis, even.available(axis)[len(even.available(axis)) // 2]) for axis in RANKS}
    chosen = {
        "own": nothing,
        **halves,
        JOINT: replace(halves["qk"], vo=halves["vo"].vo),
        **{str(index): choices for index, choices in enumerate(staged_models(even))},
    }
    requested: list[tuple[str, ...]] = []

    def timing(models: Mapping[str, nn.Module], known: CostTable = truth) -> dict[str, float]:
        requested.append(tuple(models))
        return {name: known.total(chosen[name]) for name in models}

    found = corrected(cost_table, even, timing)
    assert requested == [("own", *RANKS, JOINT, "0", "1")]  # in one run
    assert found.total(nothing) == pytest.approx(1.25) and found.total(some) == pytest.approx(truth.total(some))
    for axis in RANKS:
        cut = some.with_choice(axis, 0, 4)
        saved = cost_table.total(some) - cost_table.total(cut)
        assert found.total(some) - found.total(cut) == pytest.approx(1.25 * factors[axis] * saved)
    both = some.with_choice("qk", 0, 4).with_choice("vo", 0, 2)
    assert found.total(both) == pytest.approx(truth.total(both))
    # What is faster than its layers costs nothing beside them: its layers save more.
    faster = replace(slower, stages=cost_table.stages - 0.01 * cost_table.whole)
    free = corrected(cost_table, even, partial(timing, known=faster))
    assert (free.stages >= cost_table.stages).all() and free.total(nothing) == pytest.approx(1.25)
    assert free.total(some) < 1.25 * cost_table.total(some)
    assert free.total(some) == pytest.approx(faster.total(some), rel=0.02)
    ranks = corrected(cost_table, replace(even, axes=RANKS, reducer=None, _pieces={}), timing)
    assert requested[-1] == ("own", *RANKS, JOINT) and (ranks.stages == cost_table.stages).all()
