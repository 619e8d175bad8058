"""Weights of low rank, dead heads and poor data: what loses nothing is exact, and what overflows is refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from attnrx.change.realization import realize
from attnrx.data import Normalization, from_tensors
from attnrx.decide.diagnosing import diagnose
from attnrx.decide.rules import Rule, TotalRank, prescribe_maps
from attnrx.support.errors import InvalidInput
from attnrx.vit.attention import Attention
from attnrx.vit.models import family_of
from attnrx_lab.rules import SharedRank
from support.cases import CONFIGS, images, model
from support.pictures import speckles

CONFIG = CONFIGS["dense"]  # three heads of four directions


def lowered(attention: Attention) -> None:
    for part in ("weight", "bias"):
        own = attention.scores.query.get_parameter(part)
        own[1:4] = own[:1]


def dead(attention: Attention) -> None:
    for part in ("weight", "bias"):
        attention.scores.query.get_parameter(part)[:4] = 0


def unread(attention: Attention) -> None:
    for part in ("weight", "bias"):
        attention.value.get_parameter(part)[:4] = 0


def changed(change: Callable[[Attention], None]) -> Any:
    vit = model(CONFIG)
    with torch.no_grad():
        for attention in family_of(vit).attention(vit):
            change(attention)
    return vit


# In each, one head of three has at most one direction, so nine of twelve are enough.
@pytest.mark.parametrize("metric", ["weights", "mix", "softmax", "augmented", "centered", "activation"])
@pytest.mark.parametrize("change", [lowered, dead])
def test_directions_that_do_nothing_are_removed_exactly(change: Callable[[Attention], None], metric: str) -> None:
    vit, shown = changed(change), images(CONFIG)
    given = prescribe_maps(diagnose(vit, speckles(CONFIG)), TotalRank(9, metric=metric))
    assert list(given.ranks) == [(1, 4, 4)] * 2
    torch.testing.assert_close(realize(vit, given)(shown), vit(shown), rtol=0, atol=1e-10)


@pytest.mark.parametrize("change", [lowered, dead])
@pytest.mark.slow
def test_shared_directions_of_deficient_heads_are_exact(change: Callable[[Attention], None]) -> None:
    vit, shown = changed(change), images(CONFIG)
    given = prescribe_maps(diagnose(vit, speckles(CONFIG)), SharedRank(9, form="cp", sweeps=40))
    torch.testing.assert_close(realize(vit, given)(shown), vit(shown), rtol=0, atol=1e-8)


def test_a_head_that_reads_out_nothing_loses_nothing() -> None:
    vit, shown = changed(unread), images(CONFIG)
    given = prescribe_maps(diagnose(vit, speckles(CONFIG)), "vo=total_rank:9")
    assert all(layer.outputs["vo"].ranks == (1, 4, 4) for layer in given.layers)
    torch.testing.assert_close(realize(vit, given)(shown), vit(shown), rtol=0, atol=1e-8)


@pytest.mark.parametrize("rule", [TotalRank(0.75), SharedRank(6, sweeps=5)])
@pytest.mark.parametrize("shade", [None, 128])
def test_one_image_or_one_shade_gives_a_finite_model(shade: int | None, rule: Rule) -> None:
    vit, data = model(CONFIG), speckles(CONFIG, 1)
    if shade is not None:
        pixels = torch.full((5, 1, 8, 8), shade, dtype=torch.uint8)
        data = from_tensors("grey", pixels, torch.arange(5) % 3, Normalization(CONFIG.mean, CONFIG.std))
    found = diagnose(vit, data)
    given = prescribe_maps(found, {"qk": rule, "vo": TotalRank(0.5), "fc1": TotalRank(3), "fc2": TotalRank(3)})
    assert bool(realize(vit, given)(images(CONFIG)).isfinite().all())


def test_readings_that_overflow_are_refused_before_anything_is_saved() -> None:
    def huge(attention: Attention) -> None:
        attention.value.weight.mul_(1e22)
        attention.output.weight.mul_(1e-22)

    vit = changed(huge)
    diagnose(vit, speckles(CONFIG))
    with pytest.raises(InvalidInput, match=r"output_\w+ of layer 1 overflowed.*float64"):
        diagnose(vit.float(), speckles(CONFIG))
