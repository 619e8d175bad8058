"""Laws of the map "depth": whole sublayers are replaced by linear maps of every token."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attnrx as rx
from attnrx.change.realization.repair import Repair, repair
from attnrx.decide.planning.cost_table import prescribed_costs
from attnrx.decide.rules import control_prescriptions, parse_rules
from attnrx.decide.sublayers import observing_sublayers
from attnrx.support.errors import InvalidRule, NoOpPrescription, NotSupported, UnknownName
from attnrx.vit.maps import SUBLAYERS
from attnrx.vit.models import evaluating, family_of
from support import cases
from support.comparisons import assert_text_and_files_give_the_same_model, pixels
from support.pretrained import VIT, of_hf, of_timm

SHAPE: dict[str, Any] = {"width": 16, "depth": 3, "heads": 4, **cases.TINY}
FORMS = ("dense", "svda", "timm", "rotary")
Subjects = dict[str, tuple[nn.Module, rx.Diagnosis, Tensor]]


@pytest.fixture(scope="module")
def subjects() -> Subjects:
    own: dict[str, nn.Module] = {form: cases.model(cases.ViTConfig.uniform(form, **SHAPE)) for form in FORMS[:2]}
    small = {"img_size": 8, "patch_size": 4, "depth": 3, "embed_dim": 16, "num_heads": 4, "num_classes": 3}
    own["timm"] = rx.load(of_timm(VIT, **small))
    own["rotary"] = rx.load(of_timm("vit_small_patch16_rope_mixed_224", **small))
    found = {}
    for form, model in own.items():
        channels = SHAPE["channels"] if form in FORMS[:2] else 3
        data = pixels(cases.ViTConfig.uniform("dense", **{**SHAPE, "channels": channels}), 48)
        images = torch.cat([batch.images for batch in data.batches(24)])
        model = model.double().eval()
        diagnosis = rx.measure_sublayers(model, rx.diagnose(model, data, moments=True), data)
        found[form] = (model, diagnosis, images.double())
    return found


def replaced(prescription: rx.Prescription) -> list[tuple[int, str]]:
    layers = enumerate(prescription.layers)
    return [(index, part) for index, layer in layers for part in SUBLAYERS if layer.in_place_of(part) is not None]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "others", ["", "qk=total_rank:0.5 vo=total_rank:0.5 heads=total_rank:0.75 hidden=uniform_rank:0.75"]
)
def test_mask_equals_compress_and_costs_are_exact(subjects: Subjects, form: str, others: str) -> None:
    model, diagnosis, images = subjects[form]
    given = rx.prescribe(diagnosis, f"{others} depth=total_rank:3")
    assert len(replaced(given)) == 3
    masked, small = (rx.realize(model, given, by=by) for by in ("mask", "compress"))
    torch.testing.assert_close(masked(images), small(images), rtol=1e-9, atol=1e-9)
    assert {name: tensor.shape for name, tensor in masked.state_dict().items()} == {
        name: tensor.shape for name, tensor in model.state_dict().items()
    }
    family = family_of(small)
    costs = family.costs(small)
    assert costs == prescribed_costs(model, given)
    assert costs.params == sum(parameter.numel() for parameter in small.parameters())
    assert costs.macs < family.costs(model).macs
    width, tokens = 16, costs.layers[0].tokens
    for index, part in replaced(given):  # as many as one matrix has entries
        parts = ("mlp",) if part == "MLP" else ("query_key", "scores", "value_output", "read_out")
        assert sum(costs.layers[index].parts[name].macs for name in parts) == width**2 * tokens


@pytest.mark.parametrize("form", FORMS)
def test_text_and_files_give_the_same_model(subjects: Subjects, form: str, tmp_path: Path) -> None:
    model, diagnosis, images = subjects[form]
    given = rx.prescribe(diagnosis, "depth=energy_retention:0.8")
    assert_text_and_files_give_the_same_model(model, diagnosis, given, images, tmp_path)
    for by in ("compress", "mask"):
        made = rx.realize(model, given, by=by)
        loaded = rx.load(rx.save(made, tmp_path / by))
        torch.testing.assert_close(loaded(images), made(images), rtol=1e-4, atol=1e-6)
        assert family_of(loaded).costs(loaded) == family_of(made).costs(made)


def test_every_map_is_the_least_squares_fit_and_its_divergence_is_that_of_the_model(subjects: Subjects) -> None:
    model, diagnosis, images = subjects["timm"]
    seen: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    with (
        evaluating([model]),
        observing_sublayers(
            model, family_of(model), lambda layer, which, given, output: seen.update({(layer, which): (given, output)})
        ),
    ):
        base = model(images)
    for (layer, which), (inputs, outputs) in seen.items():
        x, y = inputs.flatten(0, 1), outputs.flatten(0, 1)
        weight, bias = (
            diagnosis.layers[layer].readings[f"sublayer_{name}"][which].double() for name in ("weight", "bias")
        )
        centered = x - x.mean(0)
        gram = centered.mT @ centered / len(x)
        gram += 1e-3 * gram.diagonal().mean() * torch.eye(16, dtype=gram.dtype)
        best = torch.linalg.solve(gram, centered.mT @ (y - y.mean(0)) / len(x)).mT
        if which == 0:
            torch.testing.assert_close(weight, best, rtol=1e-3, atol=1e-5)
        else:
            assert torch.linalg.matrix_rank(weight.float(), rtol=1e-5) == 8
        torch.testing.assert_close(bias, y.mean(0) - weight @ x.mean(0), rtol=1e-4, atol=1e-5)
    # One sublayer at a time: the text keeps all others, as it is the one of the smallest divergence.
    given = rx.prescribe(diagnosis, "depth=total_rank:5")
    ((index, part),) = replaced(given)
    other = rx.realize(model, given)(images).detach()
    divergence = (base.softmax(-1) * (base.log_softmax(-1) - other.log_softmax(-1))).sum(-1).mean()
    measured = torch.cat([layer.readings["sublayer_divergence"] for layer in diagnosis.layers])
    assert float(measured[index, SUBLAYERS.index(part)]) == pytest.approx(float(divergence), rel=1e-3)
    assert float(measured.min()) == float(measured[index, SUBLAYERS.index(part)])


def test_controls_replace_as_many_sublayers(subjects: Subjects) -> None:
    _, diagnosis, _ = subjects["timm"]
    given = rx.prescribe(diagnosis, "depth=total_rank:0.5")
    controls = control_prescriptions(diagnosis, given, draws=3)
    assert {"random", "largest"} <= controls.keys()
    assert all(len(replaced(control)) == 3 for kind in controls.values() for control in kind)
    assert not set(replaced(controls["largest"][0])) & set(replaced(given))


def test_tokens_merge_after_a_layer_without_attention(subjects: Subjects) -> None:
    model, diagnosis, images = subjects["timm"]
    for by in ("compress", "mask"):
        small = rx.realize(model, rx.prescribe(diagnosis, "depth=total_rank:1 tokens=ward:0.5@2,3"), by=by)
        assert small(images).isfinite().all()


def test_repair_lowers_the_error_and_export_agrees(subjects: Subjects, tmp_path: Path) -> None:
    model, diagnosis, images = subjects["timm"]
    small = rx.realize(model, rx.prescribe(diagnosis, "depth=total_rank:3"))
    repaired = repair(small, model, images, Repair(steps=20))
    assert sum(repaired.after) < sum(repaired.before)
    for to, name in (("program", "model.pt2"), ("onnx", "model.onnx")):  # each is compared with the model
        assert rx.export(repaired.model.float(), tmp_path / name, to=to).path.exists()


def test_what_cannot_be_prescribed_is_refused(subjects: Subjects) -> None:
    model, diagnosis, images = subjects["timm"]
    with pytest.raises(NoOpPrescription):
        rx.prescribe(diagnosis, "depth=total_rank:1.0")
    with pytest.raises(UnknownName, match="metric of depth"):
        rx.prescribe(diagnosis, "depth=total_rank:0.5,metric=mix")
    with pytest.raises(InvalidRule, match="measure_sublayers"):
        rx.prescribe(rx.diagnose(model, images), "depth=total_rank:0.5")
    with pytest.raises(InvalidRule, match="removes all of depth"):
        rx.prescribe(diagnosis, "depth=top_rank:0")
    gated = rx.load(of_hf("Dinov2ForImageClassification", use_swiglu_ffn=True))
    others = torch.randn(8, *family_of(gated).input_shape(gated))
    with pytest.raises(NotSupported, match="activation between them"):
        rx.measure_sublayers(gated, rx.diagnose(gated, others), others)
    assert str(parse_rules("depth=total_rank:0.5")[0]["depth"]) == "total_rank:0.5"


def test_the_report_shows_what_was_replaced(subjects: Subjects, tmp_path: Path) -> None:
    _, diagnosis, _ = subjects["timm"]
    given = rx.prescribe(diagnosis, "depth=total_rank:3")
    page = rx.write_report(tmp_path / "report.html", diagnosis=diagnosis, prescription=given).read_text()
    assert "Sublayers" in page and "3 of 6 kept" in page
