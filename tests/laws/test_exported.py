"""Exported == eager: masked == physical == exported == reloaded, and what may not be exported is refused by name."""

import copy
import json
import math
import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn

import attnrx as rx
from attnrx.exporting import FORMATS, Format, parse_format
from attnrx.support.errors import CheckpointError, InvalidInput, NotSupported
from attnrx.vit.models import family_of
from support.pretrained import deep, images_for, inputs

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

OUTPUTS = dict.fromkeys(("vo", "fc1", "fc2"), "uniform_rank:0.5")
RULES = {"qk": "total_rank:0.6", **OUTPUTS}
POLICIES = (None, "class_attention:0.6@2,4", "evit:0.6@2,4", "tome:0.6@2,4", "ward:0.6@2,4", "random:0.6@2,4")
POLICIES += ("ward(relevance=0.3):0.6@2,4",)


@cache
def diagnosed() -> tuple[nn.Module, rx.Diagnosis]:
    model = copy.deepcopy(deep()).float()
    return model, rx.diagnose(model, images_for(model, 12), batch_size=12)


@cache
def realized(policy: str | None, by: str) -> nn.Module:
    model, diagnosis = diagnosed()
    rules = dict(RULES)
    if policy is not None and policy.startswith("tome"):
        del rules["qk"]  # what ToMe compares are keys, which a removal of directions changes: see docs/idea.md
    return rx.realize(model, rx.prescribe(diagnosis, {**rules, "tokens": policy}), by=by).eval()


def batch(count: int) -> torch.Tensor:
    return -inputs(deep(), count).float()


def answers(model: nn.Module, count: int = 5) -> torch.Tensor:
    with torch.no_grad():
        return model(batch(count))


def require_same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-4)


CASES = [(policy, "onnx") for policy in POLICIES] + [(None, "program"), ("ward:0.6@2,4", "program")]


@pytest.mark.parametrize(("policy", "to"), CASES)
@pytest.mark.slow
def test_masked_is_physical_is_exported_is_reloaded(policy: str | None, to: str, tmp_path: Path) -> None:
    masked, small = (realized(policy, by) for by in ("mask", "compress"))
    path = tmp_path / f"small{FORMATS[to].suffix}"
    exported = rx.export(small, path, to)
    rx.save(small, tmp_path / "saved")
    reloaded = rx.load(path, trust=path.suffix == ".pt2"), rx.load(tmp_path / "saved")
    for count in (1, 5):
        wanted = answers(small, count)
        for each in (masked, exported, *reloaded):
            require_same(answers(each, count), wanted)
    assert not torch.allclose(answers(small), answers(diagnosed()[0]), rtol=1e-2)


@pytest.mark.slow
def test_a_file_has_the_scale_of_its_layers(tmp_path: Path) -> None:
    usual = realized(None, "compress")
    scaled = copy.deepcopy(usual)
    for layer in family_of(scaled).attention(scaled):
        layer.spec = layer.scores.spec = replace(layer.spec, scale=1.7 * layer.spec.scale)
    assert not torch.allclose(answers(scaled), answers(usual), rtol=1e-2)
    require_same(answers(rx.export(scaled, tmp_path / "scaled.onnx")), answers(scaled))


@pytest.mark.parametrize(
    ("policy", "to"), [("evit:0.6@2,4", "aotinductor"), ("evit:0.6@2,4", "openvino"), ("ward:0.6@2,4", "openvino")]
)
@pytest.mark.slow
def test_other_runtimes_answer_alike(policy: str, to: str, tmp_path: Path) -> None:
    if to == "openvino":
        pytest.importorskip("openvino")
    small = realized(policy, "compress")
    path = tmp_path / f"small{FORMATS[to].suffix}"
    exported = rx.export(small, path, to)
    for count in (1, 5):
        require_same(answers(exported, count), answers(small, count))
        require_same(answers(rx.load(path, trust=path.suffix == ".pt2"), count), answers(small, count))


@pytest.mark.slow
def test_an_onnx_file_with_merging_runs_in_openvino(tmp_path: Path) -> None:
    """OpenVINO does not sort stably, so merging must not depend on the order of equal keys."""
    openvino = pytest.importorskip("openvino")
    small = realized("ward:0.6@2,4", "compress")
    rx.export(small, tmp_path / "small.onnx")
    hints = {"INFERENCE_PRECISION_HINT": "f32"}
    run = openvino.Core().compile_model(str(tmp_path / "small.onnx"), "CPU", hints)
    require_same(torch.from_numpy(run(batch(5).numpy())[0]), answers(small))


@pytest.mark.parametrize("precision", ["bf16", "int8"])
@pytest.mark.slow
def test_lower_precisions_of_openvino(precision: str, tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    small = realized("ward:0.6@2,4", "compress")
    to, calibration = f"openvino(precision={precision},images=16)", images_for(small, 16)
    exported = rx.export(small, tmp_path / "small.xml", to, calibration=calibration)
    difference = (answers(exported) - answers(small)).abs().max()
    assert difference < 0.3 * answers(small).abs().max()
    assert torch.equal(answers(rx.load(tmp_path / "small.xml")), answers(exported))
    if precision == "int8":  # bfloat16 depends on the processor
        assert difference > 1e-4
        with pytest.raises(InvalidInput, match="calibration images"):
            rx.export(small, tmp_path / "other.xml", to)


@pytest.mark.parametrize("to", ["int8(images=16)", "openvino(precision=int8,images=16)"])
@pytest.mark.slow
def test_an_outlier_does_not_take_the_bits_of_its_map(to: str, tmp_path: Path) -> None:
    """Pre-trained ViTs have one hidden unit that is far above all others."""
    model, difference = copy.deepcopy(deep()).float().eval(), []
    images = images_for(model, 16)
    for size in (1.0, 200.0):
        with torch.no_grad():
            first, second = family_of(model).mlp(model)[2]
            first.get_parameter("bias")[0] = size
            second.get_parameter("weight")[:, 0] /= size
        exported = rx.export(model, tmp_path / f"{size:g}{parse_format(to).suffix}", to, calibration=images)
        difference.append(float((answers(exported) - answers(model)).norm() / answers(model).norm()))
    assert difference[1] < 2 * difference[0]


@pytest.mark.parametrize("form", ["int8(images=16)", "openvino(precision=int8,images=16)"])
@pytest.mark.slow
def test_the_quantizer_is_silent_and_reports_to_nobody(
    form: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("NNCF_CI", "CI"):
        monkeypatch.delenv(variable, raising=False)
    reports = list[object]()
    telemetry = pytest.importorskip("openvino_telemetry.backend.backend_ga4").GA4Backend
    monkeypatch.setattr(telemetry, "send", lambda self, message: reports.append(message))
    small, kind = realized(None, "compress"), parse_format(form)
    rx.export(small, tmp_path / f"small{kind.suffix}", form, calibration=images_for(small, 16))
    out, err = capfd.readouterr()
    assert not out and not [line for line in err.splitlines() if "exporting" not in line]
    assert not {"NNCF_CI", "CI"} & os.environ.keys() and not reports
    assert type(pytest.importorskip("nncf.telemetry.wrapper").telemetry).__name__ != "NNCFTelemetry"
    files = {"small.onnx"} if kind.suffix == ".onnx" else {"small.xml", "small.bin"}
    names = files | {f"small{kind.suffix}.json", "run_small.py"}
    assert {path.name for path in tmp_path.iterdir()} == names


@pytest.mark.slow
def test_the_facts_lie_beside_the_file(tmp_path: Path) -> None:
    small, path = realized(None, "compress"), tmp_path / "small.onnx"
    exported = rx.export(small, path, batch=4)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["run_small.py", "small.onnx", "small.onnx.json"]
    reported = json.loads((tmp_path / "small.onnx.json").read_text())
    assert reported["images"] == {"shape": [3, 32, 32], "precision": "float32", "batch": 4, "device": "cpu"}
    assert reported["model"]["fingerprint"] == rx.models.model_fingerprint(small)
    assert reported["normalization"]["mean"] == list(family_of(small).normalization(small)[0])
    assert (
        reported["parity"][0]["outcome"] == "holds"
        and reported["versions"]["torch"] == torch.__version__.partition("+")[0]
    )
    require_same(answers(exported, 7), answers(small, 7))  # in parts of four, the last one filled up


@pytest.mark.slow
def test_a_changed_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "small.onnx"
    rx.export(realized(None, "compress"), path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="sha256"):
        rx.load(path)


def wrong(form: Format) -> Format:
    """Returns the format, but that it writes another model than it was given."""

    class Wrong(type(form)):  # type: ignore[misc]
        def write(self, program, path, images) -> None:  # type: ignore[no-untyped-def]
            name = next(name for name in program.state_dict if name.endswith("head.bias"))
            program.state_dict[name] = nn.Parameter(program.state_dict[name] + 1)
            super().write(program, path, images)

    return Wrong(**vars(form))  # pyright: ignore[reportAbstractUsage]


@pytest.mark.parametrize(
    ("policy", "to"), [(None, "onnx"), ("ward:0.6@2,4", "onnx"), ("ward:0.6@2,4", "openvino(precision=bf16)")]
)
@pytest.mark.slow
def test_a_file_that_answers_otherwise_is_not_left(policy: str | None, to: str, tmp_path: Path) -> None:
    small = realized(policy, "compress")
    before = answers(small)
    form = wrong(parse_format(to))
    with pytest.raises(NotSupported, match="does not match the model"):
        rx.export(copy.deepcopy(small), tmp_path / f"small{form.suffix}", form, batch=2)
    assert not list(tmp_path.iterdir())
    assert torch.equal(answers(small), before)


@pytest.mark.slow
def test_an_export_leaves_the_model_alone(tmp_path: Path) -> None:
    small = realized(None, "compress").train()
    kinds = [type(layer.backend) for layer in family_of(small).attention(small)]
    rx.export(small, tmp_path / "small.onnx", batch=1)
    assert small.training and kinds == [type(layer.backend) for layer in family_of(small).attention(small)]
    small.eval()


@pytest.mark.slow
def test_int8_is_calibrated_and_judged(tmp_path: Path) -> None:
    small = realized(None, "compress")
    images = images_for(small, 16)
    with pytest.raises(InvalidInput, match="calibration images"):
        rx.export(small, tmp_path / "small.onnx", "int8")
    exported = rx.export(small, tmp_path / "small.onnx", "int8(images=16)", calibration=images)
    apart = (answers(exported) - answers(small)).abs().max()
    assert 1e-4 < apart < 0.3 * answers(small).abs().max()  # quantised, and still the same model
    with pytest.raises(NotSupported, match="does not match"):
        rx.export(small, tmp_path / "no.onnx", "int8(most_difference=0.00001)", calibration=images)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["run_small.py", "small.onnx", "small.onnx.json"]


@pytest.mark.parametrize("batch", ["dynamic", 1])
@pytest.mark.slow
def test_products_have_8_bits_in_the_runtime_also_at_fixed_sizes(batch: int | str, tmp_path: Path) -> None:
    """ONNX Runtime may join a product and its bias in an operation that it has in float alone."""
    onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    model, path, made = copy.deepcopy(deep()).float(), tmp_path / "int8.onnx", tmp_path / "optimized.onnx"
    rx.export(model, path, "int8(images=16)", calibration=images_for(model, 16), batch=batch)
    options = runtime.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(made), 3
    runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    graph = onnx.load(made).graph
    sizes = {tensor.name: len(tensor.dims) for tensor in graph.initializer}
    converted = {
        node.output[0]
        for node in graph.node
        if node.op_type == "DequantizeLinear" and sizes.get(node.input[0]) == 2  # the weight of a map, in every call
    }
    users = [node for node in graph.node if node.op_type in ("MatMul", "Gemm") and converted & {*node.input}]
    assert len(users) <= 1  # the classifier, of one token


@pytest.mark.slow
def test_images_of_another_shape_or_precision_are_refused(tmp_path: Path) -> None:
    exported = rx.export(realized(None, "compress"), tmp_path / "small.onnx", batch=1)
    for images in (torch.zeros(1, 3, 8, 8), torch.zeros(1, 3, 32, 32, dtype=torch.float64), torch.zeros(0, 3, 32, 32)):
        with pytest.raises(InvalidInput, match="takes"):
            exported(images)


@pytest.mark.slow
def test_onnx_is_written_at_exact_ranks(tmp_path: Path) -> None:
    """The file has the weights of the model, and no padding of narrow heads beside them."""
    onnx = pytest.importorskip("onnx")
    small = realized(None, "compress")
    rx.export(small, tmp_path / "small.onnx", batch=1)
    stored = sum(math.prod(each.dims) for each in onnx.load(tmp_path / "small.onnx").graph.initializer)
    assert stored <= 1.01 * sum(parameter.numel() for parameter in small.parameters())


class Ranked(nn.Module):
    """Returns which patch has the highest, the second highest, ... score. Equal patches have equal scores."""

    def __init__(self) -> None:
        super().__init__()
        sizes: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2}
        self.trunk: Any = timm.create_model("vit_tiny_patch16_224", num_classes=0, **sizes)
        nn.init.zeros_(self.trunk.pos_embed)
        self.score = nn.Linear(24, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scores = self.score(self.trunk.forward_features(images)[:, 1:])[..., 0]
        return scores.sort(dim=1, descending=True).indices.to(images.dtype)


@pytest.mark.slow
def test_what_rounding_changes_in_the_model_may_differ_in_its_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, images = Ranked().eval().float(), torch.randn(32, 3, 32, 32, dtype=torch.float32)
    images[:, :, :8, 8:16] = images[:, :, :8, :8]
    loaded = rx.load(model, outputs="regression")
    file = rx.export(loaded, tmp_path / "ranked.onnx", calibration=images)
    differs = (file(images) != loaded(images)).any(1)
    (found,) = file.facts["parity"]
    assert differs.any() == ("rounding the images" in found["claim"]) and found["outcome"] == "holds"
    form = parse_format("onnx")

    class Wrong(type(form)):  # type: ignore[misc]
        def write(self, program, path, images) -> None:  # type: ignore[no-untyped-def]
            name = next(name for name in program.state_dict if name.endswith("score.weight"))
            program.state_dict[name] = nn.Parameter(-program.state_dict[name])
            super().write(program, path, images)

    with pytest.raises(NotSupported, match="does not match the model"):
        rx.export(loaded, tmp_path / "wrong.onnx", Wrong(**vars(form)), calibration=images)  # pyright: ignore
