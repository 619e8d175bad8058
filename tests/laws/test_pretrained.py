"""Pre-trained models obey the laws that our own do: full rank == original, mask == compress, saved == loaded."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import attnrx as rx
from attnrx.change.realization import realize
from attnrx.data import LoadedImages
from attnrx.decide.diagnosing import diagnose
from attnrx.decide.rules import TotalRank, UniformRank, prescribe_maps
from attnrx.nouns.diagnosis import Diagnosis
from attnrx.nouns.prescription import Prescription
from attnrx.support.errors import NotSupported
from attnrx.vit.models import answer, family_of, load_model, save_model, working_copy
from attnrx.vit.models.boundary.adoption import adopt
from support import cases
from support.comparisons import whole
from support.pretrained import BLOCKS, HF, TIMM, VIT, adopted_once, images_for, of_hf, of_timm, twin_of

RULES = {"qk": TotalRank(0.5), "vo": UniformRank(0.5), "fc1": UniformRank(0.5), "fc2": UniformRank(0.5)}


@torch.no_grad()
def logits(model: nn.Module, images: LoadedImages) -> torch.Tensor:
    return torch.cat([answer(model, batch.images.double()) for batch in images.batches(8)])


@pytest.fixture(params=[*BLOCKS, "lvvit"])
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, LoadedImages, Diagnosis]:
    name = request.param
    model = copy.deepcopy(adopted_once(name)[2]) if name in BLOCKS else cases.own(cases.OWN[name])
    images = images_for(model)
    return model, images, diagnose(model, images, batch_size=8)


def test_all_directions_are_the_original(case: tuple[nn.Module, LoadedImages, Diagnosis]) -> None:
    model, images, found = case
    for metric in ("weights", "mix"):
        if "qk" in found.layers[0].spectrum.fixed:
            with pytest.raises(NotSupported, match="a norm over all features"):
                whole(found, metric)
            continue
        prescription = Prescription(whole(found, metric), {}, found.fingerprint, {})
        for by in ("mask", "compress"):
            realized = realize(model, prescription, by=by)
            torch.testing.assert_close(logits(realized, images), logits(model, images), rtol=1e-10, atol=1e-10)


def test_mask_equals_compress(case: tuple[nn.Module, LoadedImages, Diagnosis]) -> None:
    model, images, found = case
    family, requested = family_of(model), dict(RULES)
    # A mask needs a bias to put the mean of what is left out into.
    if not family.attention(model)[0].spec.has_bias("output"):
        del requested["vo"]
    if not all(getattr(linear, "bias", None) is not None for pair in family.mlp(model) for linear in pair):
        del requested["fc1"], requested["fc2"]
    for name in found.layers[0].spectrum.fixed:
        requested.pop(name, None)
    prescription = prescribe_maps(found, requested)
    masked, small = (realize(model, prescription, by=by) for by in ("mask", "compress"))
    torch.testing.assert_close(logits(masked, images), logits(small, images), rtol=1e-9, atol=1e-9)
    assert not torch.allclose(logits(small, images), logits(model, images), rtol=1e-3)
    costs = family_of(small).costs(small)
    assert costs.params == sum(parameter.numel() for parameter in small.parameters())


def test_twins_have_one_diagnosis_and_one_compressed_model() -> None:
    source = of_timm(VIT)
    twin = of_hf("ViTForImageClassification")
    twin.load_state_dict(twin_of(source))
    models = [adopt(TIMM, source), adopt(HF, twin)]
    images = images_for(models[0])
    found = [diagnose(model, images, batch_size=8) for model in models]
    for first, second in zip(found[0].layers, found[1].layers, strict=True):
        assert first.readings.keys() == second.readings.keys()
        for name, reading in first.readings.items():
            torch.testing.assert_close(reading, second.reading(name), rtol=1e-9, atol=1e-9, msg=name)
    small = [realize(model, prescribe_maps(each, RULES)) for model, each in zip(models, found, strict=True)]
    torch.testing.assert_close(logits(small[0], images), logits(small[1], images), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["vit", "dinov2, registers", "hf vit"])
@pytest.mark.slow
def test_a_compressed_model_is_the_same_in_another_process(name: str, tmp_path: Path) -> None:
    _, _, adopted = adopted_once(name)
    images = images_for(adopted)
    small = realize(adopted, prescribe_maps(diagnose(adopted, images, batch_size=8), RULES))
    save_model(tmp_path / "small", small)
    assert torch.equal(logits(load_model(tmp_path / "small"), images), logits(working_copy(small), images))
    assert torch.equal(logits(rx.load(tmp_path / "small"), images), logits(small, images))
    script = (
        "import sys, torch, attnrx; from attnrx.vit.models import answer; torch.set_num_threads(1);"
        "model = attnrx.load(sys.argv[1]); batch = torch.load(sys.argv[2]);"
        "torch.save(torch.no_grad()(answer)(model, batch), sys.argv[3])"
    )
    batch = next(iter(images.batches(8))).images.double()
    torch.save(batch, tmp_path / "batch.pt")
    command = [sys.executable, "-c", script, *(str(tmp_path / file) for file in ("small", "batch.pt", "logits.pt"))]
    subprocess.run(command, check=True, timeout=300)
    assert torch.equal(torch.load(tmp_path / "logits.pt"), logits(small, images))
