"""Costs, latency and memory as evidence."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import nn

import attnrx as rx
from attnrx.exporting import parse_format
from attnrx.show.checks import Check, Costs, Latency, Promises
from attnrx.show.reports import summary_of
from attnrx.support.errors import InvalidInput
from attnrx.vit.costs import LatencyProtocol, count_params
from support import pretrained
from support.comparisons import Setting


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


def test_latency_and_memory_name_their_conditions():
    setting = Setting.of("svda")
    check = Latency(batch=4, protocol=LatencyProtocol(rounds=3, warmup=1))
    time, memory = check(setting.comparison(setting.compressed, images=3))
    assert time.low is not None and time.high is not None and time.low <= time.value <= time.high
    assert (time.n, time.details["batch"], time.details["conditions"]["precision"]) == (3, 4, "float32")
    assert time.details["hardware"]
    assert memory.value == pytest.approx(
        sum(memory.details["candidate"].values()) / sum(memory.details["reference"].values())
    )
    json.dumps([asdict(time), asdict(memory)])


def quantities(evidence: rx.Evidence) -> dict[str, float]:
    return {finding.details["quantity"]: finding.value for finding in evidence.findings}


PROTOCOL = LatencyProtocol(rounds=3, warmup=1)
PLANNED = {"precision": "float32", "threads": 1, "clock": "wall", "batch": 2, "faster": 1.0}


# Rules that change weights, tokens alone, or nothing.
CHANGES = ("qk=uniform_rank:0.5", "tokens=ward:0.5@2", "")


@pytest.mark.parametrize(
    "check",
    [Latency(2, PROTOCOL, library=True), Promises(rounds=3, promised={"expected": {}, "measured": PLANNED})],
    ids=lambda check: check.name,
)
@pytest.mark.parametrize("changed", CHANGES)
@pytest.mark.filterwarnings("ignore::attnrx.support.errors.ScaleWarning")
def test_a_speed_has_the_unchanged_model_in_the_same_kernels_beside_it(check: Check, changed: str):
    model = rx.load(pretrained.of_timm("vit_tiny_patch16_224"))
    evidence = rx.verify(smaller(model, changed), model, [noise(model)], [check])
    found = quantities(evidence)
    assert {"speed" if check.name == "latency" else "promised speed", "speed by compression"} <= found.keys()
    assert "than the original in timm" in (summary := summary_of(evidence)) or "of the original in timm" in summary
    assert f" = {found['speed of unchanged']:.2f}x by attnrx's kernels x " in summary
    assert ("NOTHING WAS REMOVED" in summary) == (not changed)
    assert changed or found["speed by compression"] == 1


@pytest.mark.parametrize("library", [True, False])
def test_a_model_without_another_library_is_timed_beside_itself(library: bool):
    setting = Setting.of("svda")
    time, *_ = Latency(2, PROTOCOL, library=library)(setting.comparison(setting.compressed))
    assert "relative to the unchanged model in the same kernels" in time.claim and time.details["by_runtime"] is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("to", "runtime"), [("onnx", "ONNX Runtime in float32"), ("openvino(precision=bf16)", "OpenVINO in bfloat16")]
)
@pytest.mark.parametrize("changed", CHANGES)
@pytest.mark.filterwarnings("ignore::attnrx.support.errors.ScaleWarning")
def test_a_file_has_the_file_of_the_unchanged_model_beside_it(to: str, runtime: str, changed: str, tmp_path: Path):
    torch.set_default_dtype(torch.float32)
    model, form = rx.load(pretrained.of_timm("vit_tiny_patch16_224")), parse_format(to)
    path, calibration = tmp_path / f"file{form.suffix}", [noise(model)]
    file = rx.export(smaller(model, changed), path, to=form, precision="float32", calibration=calibration)
    evidence = rx.verify(file, model, [noise(model)], [Latency(2, PROTOCOL, library=True)])
    found = quantities(evidence)
    assert {"speed", "speed of unchanged", "speed by compression"} <= found.keys()
    assert f" = {found['speed of unchanged']:.2f}x by {runtime} x " in (summary := summary_of(evidence))
    assert ("NOTHING WAS REMOVED" in summary) == (not changed)


def smaller(model: nn.Module, rules: str) -> nn.Module:
    return rx.realize(model, rx.prescribe(rx.diagnose(model, [noise(model)]), rules)) if rules else model


def noise(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    return pretrained.inputs(model, 2), torch.arange(2)


@pytest.mark.slow
def test_a_latency_limit_fails_only_beyond_the_interval():
    setting = Setting.of("svda")
    comparison, protocol = setting.comparison(setting.compressed), LatencyProtocol(rounds=3, warmup=1)
    assert Latency(batch=2, protocol=protocol, faster=1e6)(comparison)[0].outcome == "fails"
    assert Latency(batch=2, protocol=protocol, faster=1e-6)(comparison)[0].outcome == "holds"
    with pytest.raises(InvalidInput, match="above 0"):
        Latency(faster=0.0)
