"""Costs, latency and memory as evidence."""

import json
from dataclasses import asdict

import pytest
import torch
from torch import nn

import attnrx as rx
import planned
from attnrx.checks import Comparison, Costs, Latency
from attnrx.costs import LatencyProtocol, count_params
from attnrx.errors import InvalidInput
from attnrx.model_data import images_for
from comparisons import Setting


@pytest.mark.parametrize("config", ["svda", "dense", "svda-deep"])
@pytest.mark.parametrize("pattern", ["half", "ragged", "zero", "head-removed"])
def test_closed_forms_are_what_is_counted(config: str, pattern: str):
    setting = Setting.of(config, pattern)
    params, macs, reference, candidate = Costs()(setting.comparison(setting.compressed))
    assert reference.outcome == candidate.outcome == "holds", (reference, candidate)
    assert params.details["reference"] == count_params(setting.reference)
    assert params.details["candidate"] == count_params(setting.compressed)
    assert params.value > 0 and macs.value > 0


def test_a_wrong_closed_form_is_caught():
    setting = Setting.of("svda")
    setting.reference.register_parameter("uncounted", nn.Parameter(torch.zeros(3)))
    *_, reference, _ = Costs()(setting.comparison(setting.reference))
    assert reference.outcome == "fails"
    assert reference.value == 3


def test_frozen_models_have_costs_too():
    setting = Setting.of("svda")
    setting.reference.requires_grad_(False)
    *_, reference, candidate = Costs()(setting.comparison(setting.compressed))
    assert reference.outcome == candidate.outcome == "holds"


def test_closed_forms_of_tokens_by_image_are_those_of_the_counted_pass():
    model = planned.original()
    noise = torch.randn(9, 1, 8, 8, generator=torch.Generator().manual_seed(3))
    contrasts = noise * torch.linspace(0.02, 2, 9)[:, None, None, None]
    images = images_for(model, [(image[None], torch.zeros(1, dtype=torch.long)) for image in contrasts])
    small = rx.realize(model, rx.prescribe(model, "tokens=ward:mean=0.6@2"), calibration=images)
    comparison = Comparison(small, model, images)
    _, macs, _, candidate = Costs()(comparison)
    assert macs.details["least"] < macs.details["most"]  # the first image, which is counted, and the last
    assert candidate.outcome == "holds", candidate
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_latency_and_memory_name_their_conditions():
    setting = Setting.of("svda")
    check = Latency(batch=4, protocol=LatencyProtocol(rounds=3, warmup=1))
    time, memory = check(setting.comparison(setting.compressed, images=3))
    assert time.low is not None and time.high is not None and time.low <= time.value <= time.high
    assert (time.n, time.details["batch"], time.details["conditions"]["precision"]) == (3, 4, "float32")
    assert time.details["candidate_kernel"] and time.details["hardware"]
    assert memory.value == pytest.approx(
        sum(memory.details["candidate"].values()) / sum(memory.details["reference"].values())
    )
    json.dumps([asdict(time), asdict(memory)])


@pytest.mark.slow
def test_a_latency_limit_fails_only_beyond_the_interval():
    setting = Setting.of("svda")
    comparison, protocol = setting.comparison(setting.compressed), LatencyProtocol(rounds=3, warmup=1)
    assert Latency(batch=2, protocol=protocol, faster=1e6)(comparison)[0].outcome == "fails"
    assert Latency(batch=2, protocol=protocol, faster=1e-6)(comparison)[0].outcome == "holds"
    with pytest.raises(InvalidInput, match="above 0"):
        Latency(faster=0.0)
