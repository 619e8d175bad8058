"""A dead layer is decided alone: the other layers get what they get without it, and its reason is that it is dead."""

import pytest
import torch

import attnrx as rx
from attnrx.data import ImageSet
from attnrx.decide.rules import in_metric as stated
from attnrx.decide.rules import parse_rule
from attnrx.nouns.diagnosis import Diagnosis
from attnrx.vit.maps import OUTPUT_MAPS
from attnrx.vit.models import family_of
from attnrx_lab.vision_transformer import VisionTransformer
from support import cases
from support.comparisons import pixels

DEAD = 1  # the layer
RULES = {
    "energy_retention": "energy_retention:0.7",
    "threshold": "threshold:2.0",
    "top_rank": "top_rank:2",
    "total_rank": "total_rank:0.5",
    "uniform_rank": "uniform_rank:0.5",
    "effective_rank": "effective_rank",
    "contribution_energy": "contribution_energy:0.7",
    "shrinkage": "shrinkage:1.5",
    "norm_clip": "norm_clip:1.5",
    "uniform_heads": "uniform_heads:0.02 & top_rank:3",
    "random_matched": "random_matched(total_rank:0.5)",
    "largest_matched": "largest_matched(total_rank:0.5)",
    "uniform_matched": "uniform_matched(total_rank:0.5)",
    "or": "top_rank:2 | energy_retention:0.5",
}


def diagnosed(form: str, *, dead: bool) -> tuple[VisionTransformer, Diagnosis, ImageSet]:
    model, images = cases.model(cases.CONFIGS[form]), pixels(cases.CONFIGS[form], 8)
    if dead:
        family = family_of(model)
        attention, mlp = family.attention(model)[DEAD], family.mlp(model)[DEAD]
        with torch.no_grad():
            for module in (attention.scores, attention.value, *mlp):
                for parameter in module.parameters():
                    parameter.zero_()
    readings = (*rx.diagnostics.suited_diagnostics(()), rx.diagnostics.Moments())
    return model, rx.diagnose(model, images, diagnostics=readings), images


@pytest.fixture(scope="module", params=["dense", "svda"])
def pair(request: pytest.FixtureRequest) -> dict[bool, tuple[VisionTransformer, Diagnosis, ImageSet]]:
    return {dead: diagnosed(request.param, dead=dead) for dead in (False, True)}


def test_all_readings_of_a_dead_layer_are_finite(
    pair: dict[bool, tuple[VisionTransformer, Diagnosis, ImageSet]],
) -> None:
    for layer in pair[True][1].layers:
        assert all(bool(reading.isfinite().all()) for reading in layer.readings.values())


@pytest.mark.parametrize("name", RULES)
def test_every_rule_decides_about_the_other_layers_as_without_the_dead_one(
    name: str, pair: dict[bool, tuple[VisionTransformer, Diagnosis, ImageSet]]
) -> None:
    (_, alive, _), (model, found, images) = pair[False], pair[True]
    in_metric = alive.layers[0].spectrum.norms == "none" and name != "contribution_energy"
    rule = parse_rule(RULES[name])
    expected, given = (rx.prescribe(each, stated(rule, "mix") if in_metric else rule) for each in (alive, found))
    assert torch.equal(given.layers[0].qk.keep, expected.layers[0].qk.keep)
    torch.testing.assert_close(given.layers[0].qk.strength, expected.layers[0].qk.strength)
    logits = rx.realize(model, given)(next(iter(images.batches(8))).images.double())
    assert bool(logits.isfinite().all())


@pytest.mark.parametrize("metric", ["centered", "weights"])
@pytest.mark.parametrize("which", OUTPUT_MAPS)
def test_dead_values_and_mlp_are_decided_alone(
    which: str, metric: str, pair: dict[bool, tuple[VisionTransformer, Diagnosis, ImageSet]]
) -> None:
    (_, alive, _), (model, found, images) = pair[False], pair[True]
    rule = f"uniform_rank:2,metric={metric}"
    living = rx.prescribe(found, {which: rule}).layers[0].outputs[which]
    expected = rx.prescribe(alive, {which: rule}).layers[0].outputs[which]
    torch.testing.assert_close(living.decode @ living.encode, expected.decode @ expected.encode)
    logits = rx.realize(model, rx.prescribe(found, {which: rule}))(next(iter(images.batches(8))).images.double())
    assert bool(logits.isfinite().all())
