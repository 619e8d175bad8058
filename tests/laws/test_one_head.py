"""One-head layers: every rule has the same form, mask, file and costs as with several heads."""

import re

import pytest
import torch

import attnrx as rx
from attnrx.data import ImageSet
from attnrx.nouns.diagnosis import Diagnosis
from attnrx.nouns.prescription import Prescription
from attnrx.support.errors import NotSupported
from attnrx.vit.attention import Eager, using
from attnrx.vit.costs import count_product_macs
from attnrx.vit.models import family_of
from attnrx_lab.vision_transformer import VisionTransformer, ViTConfig
from support import cases
from support.comparisons import logits, pixels

CONFIGS = {
    form: ViTConfig.uniform(form, width=8, depth=2, heads=1, **{**cases.TINY, "mlp_ratio": 3.0})
    for form in ("dense", "svda")
}
# name -> what to prescribe; those of dense models are decided in a metric.
RULES = {
    "total_rank": "total_rank:0.5",
    "uniform_rank": "uniform_rank:3",
    "contribution_energy": "contribution_energy:0.7",
    "uniform_heads": "uniform_heads:1.0",
    "random_matched": "random_matched(total_rank:0.5)",
    "largest_matched": "largest_matched(total_rank:0.5)",
    "uniform_matched": "uniform_matched(total_rank:0.5)",
    "by_layer": "by_layer(total_rank:0.5; uniform_rank:2,metric=mix)",
    "vo": "vo=total_rank:0.5",
    "vo-weights": "vo=uniform_rank:3,metric=weights",
    "fc1": "fc1=uniform_rank:3",
    "fc2": "fc2=uniform_rank:3",
    "all": "qk=total_rank:0.5 vo=total_rank:0.5 fc1=uniform_rank:3 fc2=uniform_rank:3",
}
KNOBS = {"energy_retention": "0.8", "threshold": "2.0", "top_rank": "3", "shrinkage": "0.5", "norm_clip": "0.5"}
RULES |= {name: f"{name}:{knob},metric=mix" for name, knob in KNOBS.items()}
RULES["effective_rank"] = "effective_rank:metric=mix"
DENSE_ONLY = {"fusion_rank": "fusion_rank:5"}
CASES = [("dense", name) for name in (*RULES, *DENSE_ONLY)] + [("svda", name) for name in RULES]


@pytest.fixture(scope="module")
def models() -> dict[str, VisionTransformer]:
    return {form: cases.model(config) for form, config in CONFIGS.items()}


@pytest.fixture(scope="module")
def images() -> ImageSet:
    return pixels(CONFIGS["dense"], 8)


@pytest.fixture(scope="module")
def diagnoses(models: dict[str, VisionTransformer], images: ImageSet) -> dict[str, Diagnosis]:
    readings = (*rx.diagnostics.suited_diagnostics(()), rx.diagnostics.Moments())
    return {form: rx.diagnose(model, images, diagnostics=readings) for form, model in models.items()}


def prescribed(diagnosis: Diagnosis, form: str, name: str) -> Prescription:
    rules = (RULES | DENSE_ONLY)[name]
    return rx.rules.prescribe_maps(diagnosis, re.sub("[:,]metric=mix", "", rules) if form == "svda" else rules)


@pytest.mark.parametrize(("form", "name"), CASES, ids=lambda value: value)
@pytest.mark.slow
def test_a_one_head_layer_is_realized_as_any_other(
    form: str,
    name: str,
    tmp_path,
    models: dict[str, VisionTransformer],
    images: ImageSet,
    diagnoses: dict[str, Diagnosis],
) -> None:
    model = models[form]
    written = prescribed(diagnoses[form], form, name)
    prescription = Prescription.load(written.save(tmp_path / "prescription.json"))
    masked = logits(rx.realize(model, prescription, by="mask"), images)
    small = rx.realize(model, prescription)
    torch.testing.assert_close(logits(small, images), masked, rtol=1e-9, atol=1e-9)
    assert torch.equal(logits(rx.realize(model, written), images), logits(small, images))
    again = rx.load(rx.save(small, tmp_path / "small", prescription=prescription))
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in small.state_dict().items())
    torch.testing.assert_close(logits(again, images), logits(small, images), rtol=0, atol=1e-6)
    layers = family_of(small).attention(small)
    assert all(layer.spec.form == form for layer in layers)
    assert all(not layer.qk.is_shared for layer in prescription.layers)
    with using(layers, [Eager()] * len(layers)):
        counted = count_product_macs(small, next(iter(images.batches(8))).images.double())
    assert counted == family_of(small).costs(small).product_macs


@pytest.mark.parametrize("form", ["cp", "literal"])
def test_shared_directions_of_one_head_stay_shared(
    form: str, tmp_path, models: dict[str, VisionTransformer], images: ImageSet, diagnoses: dict[str, Diagnosis]
) -> None:
    prescription = rx.prescribe(diagnoses["dense"], f"shared_rank:5,form={form}")
    prescription = Prescription.load(prescription.save(tmp_path / "prescription.json"))
    scores = [layer.qk for layer in prescription.layers]
    assert all(layer.is_shared and layer.directions == 8 and layer.kept == 5 for layer in scores)
    small = rx.realize(models["dense"], prescription)
    expected = "mixed" if form == "literal" else "shared"
    assert all(layer.spec.form == expected for layer in family_of(small).attention(small))
    with pytest.raises(NotSupported, match="by='compress'"):
        rx.realize(models["dense"], prescription, by="mask")
    found = rx.diagnose(small, images)
    assert all(layer.spectrum.shared for layer in found.layers)
    with pytest.raises(NotSupported, match="has 1 heads"):
        rx.prescribe(found, "fusion_owner")
