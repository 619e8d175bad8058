"""save == load, bit for bit, for models, diagnoses, prescriptions and evidence."""

import json
from pathlib import Path

import pytest
import torch

from attnrx.change.realization import realize
from attnrx.nouns.diagnosis import Diagnosis, LayerDiagnosis
from attnrx.nouns.evidence import Evidence, Finding
from attnrx.nouns.prescription import Prescription
from attnrx.support.errors import CheckpointError, InvalidInput
from attnrx.support.records import from_dict, to_dict
from attnrx.support.seals import sealed
from attnrx.vit.models import family_of, load_model, model_fingerprint, save_model
from attnrx.vit.spec import AttentionSpec
from attnrx_lab.lvvit import LVViTConfig
from attnrx_lab.vision_transformer import ViTConfig
from support.cases import CONFIGS, OWN, PATTERNS, images, model, own, prescription


@pytest.mark.parametrize("by", ["renormalized", "compress"])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("config", OWN)
def test_models_survive_saving(tmp_path: Path, config: str, pattern: str, by: str) -> None:
    vit = own(OWN[config])
    small = realize(vit, prescription(vit, PATTERNS[pattern]), by)
    again = load_model(save_model(tmp_path / "m", small))
    inputs = images(OWN[config])
    assert torch.equal(again(inputs), small(inputs))
    assert model_fingerprint(again) == model_fingerprint(small)
    assert not again.training and not any(parameter.is_meta for parameter in again.parameters())


@pytest.mark.parametrize("config", OWN)
def test_configurations_survive_as_dictionaries(config: str) -> None:
    record = json.loads(json.dumps(to_dict(OWN[config])))
    assert from_dict(record, (ViTConfig, LVViTConfig, AttentionSpec)) == OWN[config]


@pytest.mark.parametrize("config", OWN)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_prescriptions_survive_saving(tmp_path: Path, config: str, pattern: str) -> None:
    given = prescription(own(OWN[config]), PATTERNS[pattern])
    again = Prescription.load(given.save(tmp_path / "p.json"))
    assert again.ranks == given.ranks and again.fingerprint == given.fingerprint
    for mine, own_layer in zip(again.layers, given.layers, strict=True):
        ours, theirs = mine.qk, own_layer.qk
        assert torch.equal(mine.heads, own_layer.heads)
        assert torch.equal(ours.keep, theirs.keep)
        assert torch.equal(ours.strength, theirs.strength) and ours.reasons == theirs.reasons


@pytest.mark.parametrize("pattern", ["full", "ragged", "zero"])
def test_diagnoses_survive_saving(tmp_path: Path, pattern: str) -> None:
    vit = model(CONFIGS["svda"])
    small = realize(vit, prescription(vit, PATTERNS[pattern]))
    layers = tuple(LayerDiagnosis(a.spectrum(), {"entropy": torch.rand(3)}) for a in family_of(small).attention(small))
    given = Diagnosis(layers, model_fingerprint(small), {"data": "none"})
    again = Diagnosis.load(given.save(tmp_path / "d.json"))
    assert again.fingerprint == given.fingerprint and again.about == given.about
    for ours, theirs in zip(again.layers, given.layers, strict=True):
        for field in ("query", "key", "strength", "used"):
            assert torch.equal(getattr(ours.spectrum, field), getattr(theirs.spectrum, field))
        assert (ours.spectrum.scale, ours.spectrum.heads) == (theirs.spectrum.scale, theirs.spectrum.heads)
        assert torch.equal(ours.reading("entropy"), theirs.reading("entropy"))
    with pytest.raises(InvalidInput, match="no reading 'rank'"):
        again.layers[0].reading("rank")


def test_evidence_survives_saving(tmp_path: Path) -> None:
    findings = (
        Finding("accuracy", "the change", -0.1, "points", low=-0.3, high=0.1, n=100, seed=3),
        Finding("bounds", "Theorem 1", 0.5, limit=1.0, outcome="holds", details={"layers": [1, 2]}),
    )
    again = Evidence.load(Evidence(findings, {"data": "noise"}).save(tmp_path / "e.json"))
    assert again.findings == findings and again.outcome == "holds" and not again.failures
    assert again.of("bounds") == findings[1:]


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "emptied"])
def test_damaged_models_are_refused(tmp_path: Path, file: str, damage: str) -> None:
    folder = save_model(tmp_path / "m", model(CONFIGS["svda"]))
    damage_(folder / file, damage)
    with pytest.raises(CheckpointError):
        load_model(folder)


def damage_(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "flipped":  # one bit near the end, where the weights are
        position = len(content) - 9
        path.write_bytes(content[:position] + bytes([content[position] ^ 64]) + content[position + 1 :])
    else:
        path.write_bytes(b"" if how == "emptied" else content[: len(content) // 2])


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    one = save_model(tmp_path / "one", model(CONFIGS["svda"]))
    other = save_model(tmp_path / "other", model(CONFIGS["svda-deep"]))
    (one / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="sha256"):
        load_model(one)


def test_a_config_whose_shapes_are_not_its_weights_is_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "m", model(CONFIGS["svda"]))
    record = json.loads((folder / "config.json").read_text())
    record["model"]["classes"] = 7
    (folder / "config.json").write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match="was changed"):
        load_model(folder)
    (folder / "config.json").write_text(json.dumps(sealed(record)))
    with pytest.raises(CheckpointError, match="do not fit"):
        load_model(folder)


def test_models_with_nan_are_neither_saved_nor_loaded(tmp_path: Path) -> None:
    vit = model(CONFIGS["svda"])
    with torch.no_grad():
        vit.classifier.weight[0, 0] = torch.nan
    with pytest.raises(InvalidInput, match="NaN"):
        save_model(tmp_path / "m", vit)
    assert not (tmp_path / "m" / "config.json").exists()
