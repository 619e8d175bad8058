"""Mixed attention (IrrAtt): the shared form with equal strengths in a block, at the costs that its paper counts."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import attnrx as rx
from attnrx.change.realization import compressed_spec
from attnrx.decide.rules import prescribe_maps
from attnrx.nouns.prescription import Prescription
from attnrx.support.errors import CheckpointError, InvalidRule, NotSupported
from attnrx.support.storage import read_json, write_json
from attnrx.vit.attention import Eager, using
from attnrx.vit.costs import count_params, count_product_macs
from attnrx.vit.models import attach_tokens_, family_of
from attnrx.vit.tokens import parse_policy
from support import cases
from support.comparisons import logits, pixels

DENSE = cases.CONFIGS["dense"]
IMAGES = pixels(DENSE, 16)
VALUES = {"vo": "total_rank:0.6,minimum=0"}


@cache
def dense() -> tuple[nn.Module, rx.Diagnosis]:
    model = cases.model(DENSE)
    return model, rx.diagnose(model, IMAGES, batch_size=8)


@cache
def prescribed(form: str = "literal", rank: int = 5) -> Prescription:
    """Block terms in every layer, and values of different dimensions."""
    return rx.prescribe(dense()[1], {"qk": f"shared_rank:{rank},form={form},sweeps=5", **VALUES})


@cache
def mixed(form: str = "literal") -> nn.Module:
    return rx.realize(dense()[0], prescribed(form))


def without_blocks(prescription: Prescription) -> Prescription:
    """The same directions and strengths, to be realized in the shared form."""
    layers = []
    for layer in prescription.layers:
        assert layer.qk.basis is not None
        layers.append(layer.with_scores(replace(layer.qk, basis=replace(layer.qk.basis, blocks=None))))
    return replace(prescription, layers=tuple(layers))


def forms_of(model: nn.Module) -> set[str]:
    return {layer.spec.form for layer in family_of(model).attention(model)}


def agree(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("head_is_removed", [False, True])
def test_it_is_the_shared_form_with_equal_strengths_in_a_block(head_is_removed: bool) -> None:
    prescription = prescribed()
    if head_is_removed:
        layers = (cases.with_heads(layer, [True, False, True]) for layer in prescription.layers)
        prescription = replace(prescription, layers=tuple(layers))
    models = [rx.realize(dense()[0], each) for each in (prescription, without_blocks(prescription))]
    assert [forms_of(each) for each in models] == [{"mixed"}, {"shared"}]
    agree(logits(models[0], IMAGES), logits(models[1], IMAGES))
    assert not torch.allclose(logits(models[0], IMAGES), logits(dense()[0], IMAGES), rtol=1e-3)
    first, second = (family_of(each).costs(each) for each in models)
    assert first.params != second.params and first.macs < second.macs


def test_costs_are_those_of_the_prescription_of_the_parameters_and_of_the_products() -> None:
    model, small = dense()[0], mixed()
    costs, layers = family_of(small).costs(small), family_of(small).attention(small)
    assert any(len(set(layer.spec.value_dims)) > 1 for layer in layers)
    assert costs.params == count_params(small)
    with using(layers, [Eager()] * len(layers)):
        assert costs.product_macs == count_product_macs(small, next(iter(IMAGES.batches(4))).images.double())
    pairs = zip(family_of(model).attention(model), prescribed().layers, strict=True)
    specs = tuple(compressed_spec(attention.spec, layer) for attention, layer in pairs)
    assert family_of(model).costs(model, specs) == costs


def test_prescriptions_and_models_survive_the_disk(tmp_path: Path) -> None:
    again = Prescription.load(prescribed().save(tmp_path / "prescription.json"))
    assert torch.equal(logits(rx.realize(dense()[0], again), IMAGES), logits(mixed(), IMAGES))
    loaded = rx.load(rx.save(mixed(), tmp_path / "model"))
    assert torch.equal(logits(loaded, IMAGES), logits(mixed(), IMAGES))
    path = tmp_path / "prescription.json"
    record = read_json(path)
    record["layers"][0]["qk"]["basis"]["blocks"][0] += 1
    write_json(path, record)
    with pytest.raises(CheckpointError, match="blocks"):
        Prescription.load(path)


@pytest.mark.parametrize("by", ["mask", "compress"])
@pytest.mark.parametrize("policy", ["attention_received:0.5@2", "tome:0.5@2", "ward:0.5@2", "dynamicvit:0.5@2"])
def test_tokens_are_reduced_as_in_the_shared_form(policy: str, by: str) -> None:
    found = []
    for prescription in (prescribed(), without_blocks(prescribed())):
        model = rx.realize(dense()[0], prescription)
        reduction = attach_tokens_(model, family_of(model), parse_policy(policy), by).eval()
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in reduction.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        found.append(logits(model.double(), IMAGES))
    agree(*found)


@pytest.mark.parametrize(("rule", "has_mask"), [("fusion_owner", True), ("top_rank:2", False)])
def test_directions_removed_head_by_head_leave_heads_with_rows_of_their_own(rule: str, has_mask: bool) -> None:
    models = [rx.realize(dense()[0], each) for each in (prescribed(), without_blocks(prescribed()))]
    prescriptions = [rx.prescribe(rx.diagnose(each, IMAGES, batch_size=8), rule) for each in models]
    assert prescriptions[0].ranks == prescriptions[1].ranks
    small = [rx.realize(*pair) for pair in zip(models, prescriptions, strict=True)]
    assert [forms_of(each) for each in small] == [{"dense"}] * 2
    agree(*(logits(each, IMAGES) for each in small))
    if has_mask:  # whole blocks are removed
        agree(logits(rx.realize(models[0], prescriptions[0], by="mask"), IMAGES), logits(small[0], IMAGES))
    else:
        with pytest.raises(NotSupported, match="by='compress'"):
            rx.realize(models[0], prescriptions[0], by="mask")


@pytest.mark.parametrize("form", ["cp", "literal"])
def test_shared_directions_are_ranked_by_their_strengths(form: str) -> None:
    model = mixed(form)
    diagnosis = rx.diagnose(model, IMAGES, batch_size=8, moments=True)
    for rule in ("total_rank:0.5", "uniform_rank:0.5"):
        default, own = (rx.prescribe(diagnosis, text) for text in (rule, f"{rule},metric=own"))
        assert default.ranks == own.ranks
        agree(logits(rx.realize(model, default), IMAGES), logits(rx.realize(model, own), IMAGES))
        with pytest.raises(NotSupported, match="whose heads share them"):
            rx.prescribe(diagnosis, f"{rule},metric=weights")
    for rule in ("shared_rank:3", "fusion_rank:3"):
        with pytest.raises(InvalidRule, match="share their directions already"):
            rx.prescribe(diagnosis, rule)


def test_weaker_strengths_of_blocks_stay_mixed() -> None:
    prescription = cases.with_strength(prescribed_again(), 0.5)
    masked, small = (rx.realize(mixed(), prescription, by=by) for by in ("mask", "compress"))
    assert forms_of(small) == {"mixed"}
    agree(logits(masked, IMAGES), logits(small, IMAGES))
    assert not torch.allclose(logits(small, IMAGES), logits(mixed(), IMAGES), rtol=1e-3)


def prescribed_again() -> Prescription:
    """A prescription for the mixed model that keeps everything."""
    return cases.prescription(mixed(), cases.PATTERNS["full"])  # type: ignore[arg-type]


def test_no_heads_and_no_directions_are_realized() -> None:
    prescription = prescribed_again()
    stays = ([False] * 3, [True, False, True])
    layers = tuple(cases.with_heads(layer, own) for layer, own in zip(prescription.layers, stays, strict=True))
    masked, small = (rx.realize(mixed(), replace(prescription, layers=layers), by=by) for by in ("mask", "compress"))
    agree(logits(masked, IMAGES), logits(small, IMAGES))
    none = rx.realize(mixed(), prescribe_maps(rx.diagnose(mixed(), IMAGES, batch_size=8), "top_rank:0"))
    assert family_of(none).costs(none).params == count_params(none)


@pytest.mark.parametrize("to", ["program", "onnx"])
@pytest.mark.slow
def test_exported_is_eager(to: str, tmp_path: Path) -> None:
    if to == "onnx":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    small, inputs = rx.realize(dense()[0], prescribed()).float(), cases.images(DENSE).float()
    exported = rx.export(small, tmp_path / f"small{rx.exporting.FORMATS[to].suffix}", to)
    with torch.no_grad():
        torch.testing.assert_close(exported(inputs), small(inputs), rtol=2e-4, atol=2e-4)
