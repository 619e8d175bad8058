"""Refinement brings the attention of a compressed layer nearer to the original's, and never the other way."""

import copy

import pytest
import torch

from attnrx.change.realization import realize
from attnrx.change.realization.refinement import Refinement, refine
from attnrx.decide.diagnosing import diagnose
from attnrx.decide.rules import SharedRank, TotalRank, UniformRank, prescribe_maps
from attnrx.support.errors import InvalidInput
from attnrx.vit.models import family_of
from support import cases
from support.comparisons import pixels

DENSE = cases.CONFIGS["dense"]
RULES = {"per head": TotalRank(0.5), "shared": SharedRank(4, sweeps=10), "weights": UniformRank(1)}


@pytest.mark.parametrize("name", RULES)
def test_every_layer_comes_nearer(name: str) -> None:
    model, images = cases.model(DENSE), pixels(DENSE, 24)
    small = realize(model, prescribe_maps(diagnose(model, images, batch_size=8), RULES[name]))
    refined = refine(small, model, images, Refinement(steps=60, learning_rate=0.02, batch=8))
    assert len(refined.before) == DENSE.depth
    for before, after in zip(refined.before, refined.after, strict=True):
        assert after < 0.95 * before  # 0.90 with torch 2.11, less with torch 2.15
    specs = [[layer.spec for layer in family_of(each).attention(each)] for each in (refined.model, small)]
    assert specs[0] == specs[1]
    assert not any(parameter.grad is not None for parameter in refined.model.parameters())


def test_the_candidate_and_the_reference_stay_as_they_were() -> None:
    model, images = cases.model(DENSE), pixels(DENSE, 8)
    small = realize(model, prescribe_maps(diagnose(model, images, batch_size=8), TotalRank(0.5)))
    before = [copy.deepcopy(each.state_dict()) for each in (model, small)]
    first, again = (refine(small, model, images, Refinement(steps=5)) for _ in range(2))
    for each, state in zip((model, small), before, strict=True):
        assert all(torch.equal(each.state_dict()[name], value) for name, value in state.items())
    for name, value in first.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value)


def test_a_model_that_loses_nothing_is_left_alone() -> None:
    model, images = cases.model(DENSE), pixels(DENSE, 8)
    refined = refine(model, model, images, Refinement(steps=3))
    assert refined.before == refined.after
    for name, value in refined.model.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)


def test_models_of_other_depth_and_senseless_knobs_are_refused() -> None:
    model, other = cases.model(DENSE), cases.model(cases.CONFIGS["svda-deep"])
    with pytest.raises(InvalidInput, match="3 layers"):
        refine(other, model, pixels(DENSE, 8))
    with pytest.raises(InvalidInput, match=r"steps=0.*positive whole number"):
        Refinement(steps=0)
