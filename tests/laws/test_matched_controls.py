"""Matched controls cost what the prescription costs: equal integers for every layer and map."""

import random
from dataclasses import dataclass
from typing import Any

import pytest
from torch import nn

import attnrx as rx
from attnrx.decide.planning.cost_table import prescribed_costs
from attnrx.nouns.diagnosis import Diagnosis
from attnrx.nouns.prescription import Prescription
from attnrx.support.errors import NoOpPrescription, NotSupported
from attnrx.vit.models import family_of
from attnrx_lab.rules import CONTROLS, control_prescriptions
from support import cases
from support.comparisons import pixels
from support.pretrained import VIT, of_timm

COMBINATIONS = 100
SCORES = {
    "dense": (
        None,
        "total_rank:0.5",
        "total_rank:0.3,scope=model,metric=centered",
        "uniform_rank:0.5,metric=weights",
        "energy_retention:0.8,metric=softmax",
        "energy_retention:0.6,metric=weights & top_rank:3",
        "by_layer(top_rank:1,metric=augmented; top_rank:2; top_rank:2)",
        "contribution_energy:0.7",
    ),
    "svda": (
        None,
        "energy_retention:0.8",
        "total_rank:0.5",
        "effective_rank & top_rank:3",
        "top_rank:2 | shrinkage:0.3",
    ),
}
VALUES = (
    None,
    "total_rank:0.5",
    "uniform_rank:0.5,metric=weights",
    "energy_retention:0.7",
    "total_rank:0.4,scope=model",
)
HEADS = (None, None, "remove_heads:0.01,0.01", "total_rank:2", "energy_retention:0.8,metric=weights")
MLP = (
    None,
    "uniform_rank:0.3",
    "total_rank:3,metric=weights",
    "energy_retention:0.5",
    "by_layer(top_rank:2; top_rank:3; top_rank:4)",
)
TOKENS = (
    None,
    "attention_received:0.6@2",
    "evit(scores=attention_received):0.5@2",
    "tome:1@every",
    "dynamicvit:0.5@2",
    "random(seed=4):0.5@2",
)


@dataclass(frozen=True, eq=False)
class Subject:
    """A model of three layers and its diagnosis; `form` selects the rules of its scores."""

    form: str
    model: nn.Module
    diagnosis: Diagnosis


@pytest.fixture(scope="module")
def subjects() -> list[Subject]:
    shape: dict[str, Any] = {"width": 12, "depth": 3, "heads": 3, **cases.TINY}
    readings = (*rx.diagnostics.suited_diagnostics(()), rx.diagnostics.Moments())
    own = {form: cases.model(cases.ViTConfig.uniform(form, **shape)) for form in SCORES}
    found = [
        Subject(form, model, rx.diagnose(model, pixels(model.config, 12), diagnostics=readings))
        for form, model in own.items()
    ]
    timm = rx.load(of_timm(VIT, img_size=8, patch_size=4, depth=3, num_classes=3))
    colours = pixels(cases.ViTConfig.uniform("dense", **{**shape, "channels": 3}), 12)
    return [*found, Subject("dense", timm, rx.diagnose(timm, colours, diagnostics=readings))]


def prescribed(subject: Subject, draw: random.Random) -> Prescription:
    """A random combination that changes something."""
    while True:
        scores = draw.choice(SCORES[subject.form])
        linear = draw.choice(MLP)
        values, heads, tokens = (draw.choice(rules) for rules in (VALUES, HEADS, TOKENS))
        maps = {"qk": scores, "vo": values, "fc1": linear, "fc2": linear, "heads": heads, "tokens": tokens}
        try:
            return rx.prescribe(subject.diagnosis, maps)
        except NoOpPrescription:
            continue


def layer_costs(model: nn.Module, prescription: Prescription) -> list[dict[str, Any]]:
    return [layer.parts | {"tokens": layer.tokens} for layer in prescribed_costs(model, prescription).layers]


def kept(prescription: Prescription) -> list[Any]:
    """The chosen directions of every map, and the policy."""
    tensors = [
        tensor
        for layer in prescription.layers
        for tensor in (
            layer.qk.keep.double() * layer.qk.strength,
            *(output.encode for output in layer.outputs.values()),
        )
    ]
    return [*(tensor.tolist() for tensor in tensors), prescription.tokens and str(prescription.tokens.policy)]


@pytest.mark.slow
def test_controls_of_100_random_prescriptions_cost_equal_integers(subjects: list[Subject]) -> None:
    draw = random.Random(0)
    counts: dict[str, int] = dict.fromkeys(CONTROLS, 0)
    for number in range(COMBINATIONS):
        subject = subjects[number % len(subjects)]
        prescription = prescribed(subject, draw)
        controls = control_prescriptions(subject.diagnosis, prescription, draws=1, seed=number)
        assert "random" in controls, prescription.rules
        wanted = layer_costs(subject.model, prescription)
        for kind, each in controls.items():
            counts[kind] += 1
            for control in each:
                assert layer_costs(subject.model, control) == wanted, (kind, prescription.rules)
                assert control.rules.keys() == prescription.rules.keys()
        if number % 20 == 0:  # as realized, too
            models = [rx.realize(subject.model, each) for each in (prescription, controls["random"][0])]
            one, other = ([layer.parts for layer in family_of(model).costs(model).layers] for model in models)
            assert one == other
    assert min(counts.values()) > COMBINATIONS // 4, counts


@pytest.mark.parametrize(
    ("maps", "kinds"),
    [
        ("vo=total_rank:0.5", {"random", "largest", "uniform"}),
        ("fc1=uniform_rank:0.3", {"random", "largest"}),
        ("fc2=uniform_rank:0.3", {"random", "largest"}),
        ("fc1=uniform_rank:0.3 fc2=uniform_rank:0.3", {"random", "largest"}),
        ("tokens=evit(scores=attention_received):0.5@2", {"random"}),
    ],
    ids=["vo", "fc1", "fc2", "both linear maps", "tokens"],
)
def test_every_map_alone_has_controls(subjects: list[Subject], maps: str, kinds: set[str]) -> None:
    subject = subjects[-1]
    prescription = rx.prescribe(subject.diagnosis, maps)
    controls = control_prescriptions(subject.diagnosis, prescription, draws=2)
    assert controls.keys() == kinds
    assert all(kept(control) != kept(prescription) for each in controls.values() for control in each)
    assert kept(controls["random"][0]) != kept(controls["random"][1])


def test_shared_directions_have_random_controls_only(subjects: list[Subject]) -> None:
    subject = subjects[0]
    prescription = rx.prescribe(subject.diagnosis, "shared_rank:5,sweeps=1,form=cp")
    assert control_prescriptions(subject.diagnosis, prescription, draws=1).keys() == {"random"}
    with pytest.raises(NotSupported, match="uniform_matched"):
        control_prescriptions(subject.diagnosis, prescription, ("uniform",))


def test_controls_of_a_model_with_shared_directions_use_as_many(subjects: list[Subject]) -> None:
    dense = subjects[0]
    shared = rx.realize(dense.model, rx.prescribe(dense.diagnosis, "shared_rank:6,sweeps=1,form=cp"))
    found = rx.diagnose(shared, pixels(dense.model.config, 12))  # type: ignore[arg-type]
    prescription = rx.prescribe(found, "top_rank:2")
    (control,) = control_prescriptions(found, prescription, ("random",), draws=1)["random"]
    assert [layer.qk.kept for layer in control.layers] == [layer.qk.kept for layer in prescription.layers]
    assert layer_costs(shared, control) == layer_costs(shared, prescription)
