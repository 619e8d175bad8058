"""Plans of every architecture that can be adopted: over the axes that it has, or refused with a reason."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import attnrx as rx
from attnrx.change.realization import realize
from attnrx.decide.planning import Plan, PlanSettings
from attnrx.nouns.effort import AXIS_WORDS
from attnrx.support.errors import InvalidRule, NotSupported
from attnrx.vit.models import family_of
from support import pretrained

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

# What the plan of an architecture is without; of all others it has every axis.
LACKING = {
    "vit, norms of query and key": {"qk"},
    "vit, norm of the outputs": {"vo"},
    "beit3, norm of the outputs": {"vo"},
    "sapiens2, grouped heads": {"qk"},
    "hf clip": {"tokens"},
    "hf yolos": {"tokens"},
    "hf dpt": {"tokens"},
    "hf videomae": {"tokens"},
}
QUICK = ("vit", "vit, norm of the outputs", "timm siglip", "rotary, mixed", "eva02", "hf beit", "hf dinov3", "own")


def plan_of(model: nn.Module, **settings: Any) -> tuple[Plan, list[str]]:
    """Returns the plan of a small model for most of its MACs, and the log."""
    lines: list[str] = []
    images = pretrained.inputs(model, 6)
    diagnosis = rx.diagnose(model, images, batch_size=6, moments=True)
    preset = PlanSettings.preset("quick", trials=0, batch_size=6, log=lines.append)
    given = replace(preset, **settings)
    return rx.plan(model, diagnosis, "macs=0.9x", images, -pretrained.inputs(model, 4), settings=given), lines


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in pretrained.CASES
        if name in LACKING or name in pretrained.BLOCKS
    ],
)
def test_every_architecture_is_planned_over_the_axes_that_it_has(name: str) -> None:
    model = pretrained.adopted_once(name)[2]
    found, lines = plan_of(model)
    lacking = LACKING.get(name, set())
    assert set(found.about["axes"]) == {"qk", "vo", "mlp", "tokens"} - lacking
    left_out = [line.removeprefix("the plan is without ").partition(":")[0] for line in lines if "is without" in line]
    assert left_out == [AXIS_WORDS[axis] for axis in AXIS_WORDS if axis in lacking]
    slim = realize(model, found.prescription)
    assert family_of(slim).costs(slim).macs <= 0.9 * family_of(model).costs(model).macs
    with torch.no_grad():
        rx.models.working_copy(slim)(pretrained.inputs(model))
    for axis in lacking:  # an axis that is named is not left out
        with pytest.raises((NotSupported, InvalidRule), match=r"[Oo]mit|nothing of|pruned only"):
            plan_of(model, axes=(axis,))


def test_a_model_of_one_layer_is_planned_without_tokens() -> None:
    model = rx.load(pretrained.of_timm(pretrained.VIT, depth=1))
    found, lines = plan_of(model)
    assert found.about["axes"] == ["qk", "vo", "mlp"]
    assert any("without tokens" in line and "has 1 layers" in line for line in lines)


@pytest.mark.parametrize(("size", "patches"), [(8, 1), (16, 4), (24, 9)])
def test_images_of_few_patches_are_planned(size: int, patches: int) -> None:
    model = rx.load(pretrained.of_timm(pretrained.VIT, img_size=size))
    found, _ = plan_of(model)
    assert ("tokens" in found.about["axes"]) == (patches > 1)
    tokens, _ = plan_of(model, axes=("tokens",)) if patches > 1 else (None, None)
    if tokens is not None and tokens.prescription.tokens is not None:
        assert 0 < tokens.prescription.tokens.policy.keep[-1] < 1
    else:
        with pytest.raises(NotSupported, match="1 patches"):
            plan_of(model, axes=("tokens",))


def test_a_reducer_that_is_named_is_not_left_out() -> None:
    model = pretrained.adopted_once("hf clip")[2]
    with pytest.raises(NotSupported, match="pruned only where"):
        plan_of(model, reducer="ward")
