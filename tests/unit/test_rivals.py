"""A result with a file is measured beside what a user has without a plan, and gives way to what is better."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import attnrx as rx
from attnrx.data.model_data import images_for
from attnrx.decide.planning.cost_table import exact_cost_table
from attnrx.decide.planning.measured_costs import PlanTimer
from attnrx.decide.planning.space import Space
from attnrx.exporting import UNCHANGED, Baseline, Exported, library_subject, parse_format, vendor_file
from attnrx.nouns.effort import PlanSettings
from attnrx.nouns.target import Target
from attnrx.show.checks import Comparison
from attnrx.show.reports.results import measured_files, summary_of
from attnrx.support.errors import NotSupported
from attnrx.support.estimate import Estimate
from attnrx.vit.costs import Conditions, LatencyProtocol
from attnrx.vit.models import model_fingerprint
from attnrx.workflows.rivals import PLAN, RESULT, FileRun, MeasuredFile, measure_baseline, measure_files
from support.pretrained import of_timm
from support.report_content import latency

pytest.importorskip("onnxruntime")


def images(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def model() -> Any:
    return rx.load(of_timm("vit_tiny_patch16_224", depth=3, num_classes=3)).float().eval()


def measured(title: str, speed: float, divergence: float, to: str = "onnx", is_own: bool = True) -> MeasuredFile:
    one, other = Estimate(speed, speed, speed), Estimate(divergence, divergence, divergence)
    timing = replace(latency(), faster=one)
    return MeasuredFile(title, parse_format(to), is_own, one, speed, other, "nats", 500, None, 1, timing)


def run_of(*files: MeasuredFile) -> FileRun:
    return FileRun({file.title: file for file in files}, files[0].title)


class Map(nn.Module):
    """A module whose code calls `len` on the images, which a trace would store as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = of_timm("vit_tiny_patch16_224", depth=2, num_classes=0)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens = self.trunk.forward_features(images)[:, 1:]
        return tokens.transpose(1, 2).reshape(len(images), tokens.shape[2], -1).mean(1)


@pytest.mark.parametrize("form", ["openvino", "openvino(precision=int8)"])
def test_the_vendors_file_takes_any_number_of_images(form: str, tmp_path: Path) -> None:
    for library in parse_format(form).libraries:
        pytest.importorskip(library)
    original = rx.load(Map().float().eval())
    subject = library_subject(original, parse_format(form), images_for(original, images(8), "images"))
    file = vendor_file(subject, tmp_path / "file.xml", parse_format(form))
    for count in (1, 3):
        assert file(images(count)).shape == original(images(count)).shape


@pytest.mark.slow
@pytest.mark.parametrize("to", ["onnx", "openvino(precision=bf16)", "openvino(precision=int8,images=16)"])
def test_all_files_are_measured_in_one_run(to: str) -> None:
    for library in ("openvino", "nncf"):
        pytest.importorskip(library)
    original, lines = model(), list[str]()
    result = rx.realize(original, rx.prescribe(rx.diagnose(original, images(16)), "hidden=uniform_rank:0.5"))
    data = images_for(original, images(32), "images")
    protocol = LatencyProtocol(Conditions(threads=1), rounds=3, warmup=1)
    run = measure_files(original, result, parse_format(to), data, data, protocol, images(2), lines.append)
    own = [file for file in run.files.values() if file.is_own]
    vendors = [file for file in run.files.values() if not file.is_own]
    baseline = run.files[run.baseline]
    assert (baseline.speed.value, baseline.is_own, baseline.form) == (1.0, False, parse_format(to))
    assert len(vendors) == 2, lines
    assert [file.form.calibrated for file in vendors] == [False, True]
    assert run.unchanged.gain == 1.0 and run.result.divergence.value > 0
    assert {file.form.calibrated for file in own if file is not run.result} == (
        {True} if "int8" in to else {False, True}
    )
    # Of the model itself, whose files differ by rounding.
    assert vendors[0].divergence.value < 1e-4 > run.unchanged.divergence.value or "int8" in to
    assert all(title in " ".join(lines) for title in run.files)
    for name, file in run.files.items():  # all files run at once, and give what each of them gives on its own
        assert file.file is not None
        outputs = Comparison(file.file, original, data).outputs
        expected = outputs.divergence("reference", "candidate").double().mean()
        assert_close(torch.tensor(file.divergence.value), expected.cpu(), atol=1e-6, rtol=1e-3, msg=name)
    evidence = run.added_to(rx.Evidence((), {}), Target("latency", 0.5), None)
    # The headline is the speed of the result in this run.
    assert evidence.findings[0].value == run.result.speed.value and evidence.findings[0].limit == 2.0
    assert f"than {run.baseline} at batch 2" in summary_of(evidence) or run.result.speed.value < 1
    title, rows = measured_files(evidence)
    assert "batch 2, 1 thread" in title and [row[0] for row in rows] == list(run.files)


def test_a_file_is_better_if_it_is_faster_and_no_farther() -> None:
    vendor, unchanged = measured("vendor", 1.0, 0.0, is_own=False), measured(UNCHANGED, 1.1, 0.0)
    bits = measured("int8", 1.5, 0.01, "int8")
    plan = measured(RESULT, 1.4, 0.02)
    run = run_of(vendor, unchanged, bits, plan)
    assert run.better() == [bits]
    assert run_of(vendor, unchanged, bits, replace(plan, divergence=Estimate(0.005, 0.005, 0.005))).better() == []
    assert run_of(vendor, unchanged, bits, replace(plan, speed=Estimate(1.0, 1.0, 1.0))).better() == [bits, unchanged]
    evidence = run.added_to(
        rx.Evidence((), {"warnings": ["other"], "nothing_removed": True}), Target("macs", 0.5), bits
    )
    other, instead = evidence.warnings
    assert other == "other" and instead.startswith("NOTHING WAS REMOVED: int8 alone is 1.50x as fast as vendor")
    assert "The plan was 1.40x as fast" in instead and "give to='int8'" in instead
    # The plan is measured, and is not the result. What is faster about the result is its 8 bits.
    assert PLAN in [finding.details.get("title") for finding in evidence.findings]
    assert summary_of(evidence).count("NOTHING WAS REMOVED") == 1 and RESULT not in str(evidence.findings)


def measuring(monkeypatch: pytest.MonkeyPatch, *files: MeasuredFile) -> None:
    """Lets every run measure these files, and the result's only if there is one."""

    def measure(original: Any, result: Any, *_: Any, **__: Any) -> FileRun:
        return run_of(*(file for file in files if result is not None or file.title != RESULT))

    monkeypatch.setattr("attnrx.workflows.shrink.measure_files", measure)


@pytest.mark.slow
@pytest.mark.parametrize(("speed", "divergence", "is_better"), [(9.0, 0.0, True), (9.0, 1.0, False)])
def test_no_plan_is_returned_that_a_file_of_the_unchanged_model_is_better_than(
    speed: float, divergence: float, is_better: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bits = measured(f"{UNCHANGED}, int8", speed, divergence, "int8")
    vendor = measured("vendor", 0.5, 0.0, is_own=False)
    measuring(monkeypatch, vendor, measured(UNCHANGED, 1.0, 0.0), bits, measured(RESULT, 1.2, 0.5))
    monkeypatch.setattr("attnrx.workflows.shrink.measure_baseline", lambda *_: (None, 0.0))
    # The plan is one for this share of the MACs, whatever its file's speed is on this machine.
    planner = "attnrx.decide.planning.planner"
    monkeypatch.setattr(f"{planner}.PlanTimer.cost_table", lambda self: exact_cost_table(self.space, "macs"))
    monkeypatch.setattr(f"{planner}.Planner._by_timing", lambda self, target: self._searched(0.8))
    shrunk = rx.shrink(model(), images(48), faster=1.0001, batch=2, threads=1, to="onnx")
    assert (shrunk.prescription is None, shrunk.form) == (is_better, "int8" if is_better else "onnx")
    assert ("int8 alone is 9.00x as fast as vendor" in summary_of(shrunk.evidence)) == is_better
    assert [finding.value for finding in shrunk.evidence.of("files")] == [0.5, 1.0, speed, 1.2]


@pytest.mark.parametrize(
    ("target", "speed", "is_changed"),
    [
        ("macs", 0.9, False),
        pytest.param("macs", 1.1, True, marks=pytest.mark.slow),
        pytest.param("params", 0.9, True, marks=pytest.mark.slow),
    ],
)
def test_the_unchanged_model_is_the_result_where_the_smaller_file_is_slower(
    target: str, speed: float, is_changed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    measuring(monkeypatch, measured(UNCHANGED, 1.0, 0.0), measured(RESULT, speed, 0.5))
    request: dict[str, Any] = {target: 0.8}
    found = rx.shrink(model(), images(48), **request, to="onnx")
    assert (found.prescription is not None) == is_changed and found.form == "onnx"
    assert (model_fingerprint(found.model) != model_fingerprint(model())) == is_changed


@pytest.mark.parametrize(
    ("to", "title"),
    [
        (None, "the original in timm"),
        ("program", "torch.export of your model"),
        pytest.param("onnx", "torch.onnx's own conversion to float32", marks=pytest.mark.slow),
        pytest.param("int8(images=8)", "ONNX Runtime's own conversion to int8", marks=pytest.mark.slow),
        pytest.param("openvino", "OpenVINO's own conversion to float32", marks=pytest.mark.slow),
        pytest.param("openvino(precision=bf16)", "OpenVINO's own conversion to bfloat16", marks=pytest.mark.slow),
        pytest.param("openvino(precision=int8,images=8)", "OpenVINO's own conversion to int8", marks=pytest.mark.slow),
    ],
)
def test_faster_counts_from_the_model_as_it_runs_without_attnrx(to: str | None, title: str) -> None:
    for library in ("openvino", "nncf"):
        pytest.importorskip(library)
    original, lines = model(), list[str]()
    data = images_for(original, images(16), "images")
    settings = PlanSettings(to=to, batch=2, conditions=Conditions(threads=1), in_subprocess=False)
    space = Space.of(original, rx.diagnose(original, images(8), moments=True), Target("latency", 0.5), settings)
    baseline = PlanTimer(space, settings, data).baseline
    assert baseline.title == title and (baseline.form is None) == (to is None)
    if to is not None:
        assert isinstance(baseline.model, Exported) and baseline.model.form == parse_format(to)
        found, speed = measure_baseline(original, parse_format(to), data, replace(settings, log=lines.append), 0.999)
        assert found.title == title and speed > 0
        assert f"faster= counts from {title}" in lines[0] and "eager PyTorch" in lines[1]
        with pytest.raises(NotSupported, match=f"out of reach: without any block .* {re.escape(title)}"):
            measure_baseline(original, parse_format(to), data, settings, 1e-4)


def test_a_tool_that_fails_is_replaced_by_the_file_of_the_unchanged_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise NotSupported("torch.onnx fails")

    monkeypatch.setattr("attnrx.exporting.baseline.vendor_file", fail)
    original, lines = model(), list[str]()
    baseline = Baseline.as_file(original, parse_format("onnx"), images_for(original, images(4), "images"), lines.append)
    assert baseline.title == UNCHANGED and "torch.onnx fails" in lines[0]
