"""The verb `diagnose`, over every model of the case table, and the comparison of two diagnoses."""

from pathlib import Path

import pytest
import torch

from attnrx.change.realization import realize
from attnrx.decide.diagnosing import diagnose
from attnrx.decide.diagnostics import Geometry, SpectralShape
from attnrx.nouns.diagnosis import Diagnosis
from attnrx.support.errors import InvalidInput
from attnrx.vit.models import family_of, model_fingerprint
from attnrx_lab.perturbation import measure_perturbation
from attnrx_lab.redundancy import Redundancy
from attnrx_lab.vision_transformer import VisionTransformer
from support.cases import CONFIGS, PATTERNS, model, prescription
from support.pictures import speckles as data

PER_HEAD = {"active_directions", "alignment", "effective_rank", "entropy", "selectivity", "sensitivity", "sparsity"}


def equal(first: Diagnosis, second: Diagnosis, tolerance: float) -> None:
    for one, other in zip(first.layers, second.layers, strict=True):
        assert one.readings.keys() == other.readings.keys()
        for name, reading in one.readings.items():
            torch.testing.assert_close(reading, other.readings[name], rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_size_of_batches_changes_nothing(name: str) -> None:
    vit, images = model(CONFIGS[name]), data(CONFIGS[name])
    everything = (SpectralShape(), Geometry(), Redundancy())
    equal(
        diagnose(vit, images, diagnostics=everything),
        diagnose(vit, images, diagnostics=everything, batch_size=3),
        1e-12,
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_readings_stay_within_their_bounds(name: str) -> None:
    for layer in diagnose(model(CONFIGS[name]), data(CONFIGS[name])).layers:
        heads, directions = layer.spectrum.strength.shape
        extra = {"effective_rank_mix"} if layer.spectrum.norms == "none" else set[str]()
        assert {name for name, reading in layer.readings.items() if reading.ndim == 1} == PER_HEAD | extra
        for reading in extra:
            assert ((layer.reading(reading) >= 1) & (layer.reading(reading) <= directions)).all()
        assert ((layer.reading("effective_rank") >= 1) & (layer.reading("effective_rank") <= directions)).all()
        assert (layer.reading("alignment").abs() <= 1).all()
        assert ((layer.reading("selectivity") >= 0) & (layer.reading("selectivity") <= 1)).all()
        assert layer.reading("query_moment").shape == layer.reading("key_moment").shape == (heads, directions)
        assert layer.reading("query_gram").shape == (heads, directions, directions)
        if layer.spectrum.norms != "none":  # unit rows
            torch.testing.assert_close(layer.reading("query_moment").sum(-1), torch.ones(heads))


@pytest.mark.parametrize("pattern", ["ragged", "zero", "head-removed"])
def test_a_compressed_model_reads_as_its_mask(pattern: str) -> None:
    vit = model(CONFIGS["svda"])
    given = prescription(vit, PATTERNS[pattern])
    masked, slim = (diagnose(realize(vit, given, by=by), data(CONFIGS["svda"])) for by in ("mask", "compress"))
    for before, after in zip(masked.layers, slim.layers, strict=True):
        stored = list(after.spectrum.heads)
        for name in ("selectivity", "entropy", "effective_rank", "sensitivity"):
            torch.testing.assert_close(after.reading(name), before.reading(name)[stored], rtol=0, atol=1e-10, msg=name)
        after_similarity, before_similarity = after.reading("output_similarity"), before.reading("output_similarity")
        torch.testing.assert_close(after_similarity, before_similarity[stored][:, stored], rtol=0, atol=1e-10)


def test_a_layer_without_heads_has_empty_readings() -> None:
    config = CONFIGS["svda"]
    bare = config.with_layer(0, config.attention[0].with_ranks((), (), "kept"))
    first, second = diagnose(VisionTransformer(bare), data(config)).layers
    assert first.readings.keys() == second.readings.keys()
    assert all(reading.shape[0] == 0 for reading in first.readings.values())


def test_the_model_is_only_watched() -> None:
    vit = model(CONFIGS["svda"])
    vit.train()
    vit.layers[1].eval()
    modes = [module.training for module in vit.modules()]
    backends = [layer.backend for layer in family_of(vit).attention(vit)]
    before = model_fingerprint(vit)
    diagnosis = diagnose(vit, data(CONFIGS["svda"]))
    assert [module.training for module in vit.modules()] == modes
    assert all(a is b.backend for a, b in zip(backends, family_of(vit).attention(vit), strict=True))
    assert before == model_fingerprint(vit) == diagnosis.fingerprint
    assert all(parameter.grad is None for parameter in vit.parameters())
    assert torch.is_grad_enabled()


def test_about_says_how_it_was_taken_and_survives_the_disk(tmp_path: Path) -> None:
    vit, images = model(CONFIGS["svda"]), data(CONFIGS["svda"])
    found = diagnose(vit, images, images=6, seed=4, diagnostics=(SpectralShape(),))
    assert found.about["data"] == {"name": "speckles", "images": 6, "fingerprint": images.take(6).fingerprint}
    assert found.about["seed"] == 4
    assert found.about["diagnostics"][0] == {"type": "SpectralShape"}
    found.save(tmp_path / "diagnosis")
    loaded = Diagnosis.load(tmp_path / "diagnosis")
    assert loaded.about == found.about
    equal(loaded, found, 0.0)


@pytest.mark.parametrize("pattern", [None, "ragged", "zero"])
def test_the_response_to_perturbations_depends_on_the_seed_and_not_on_batches(pattern: str | None) -> None:
    vit, images = model(CONFIGS["svda"]), data(CONFIGS["svda"])
    if pattern is not None:
        vit = realize(vit, prescription(vit, PATTERNS[pattern]), by="mask")
    found = diagnose(vit, images)
    first, again, other = (
        [layer.reading("perturbation_response") for layer in measure_perturbation(vit, found, images, **how).layers]
        for how in ({"seed": 1}, {"seed": 1, "batch_size": 3}, {"seed": 2})
    )
    for one, same, changed in zip(first, again, other, strict=True):
        torch.testing.assert_close(one, same, rtol=0, atol=1e-12)
        assert (one >= 0).all() and (pattern is not None or one.ne(changed).all())


def test_nan_weights_are_refused_by_name() -> None:
    vit = model(CONFIGS["svda"])
    with torch.no_grad():
        family_of(vit).attention(vit)[1].value.weight[0, 0] = float("nan")
    with pytest.raises(InvalidInput, match=r"layers\.1\.attention\.value\.weight"):
        diagnose(vit, data(CONFIGS["svda"]))


def test_an_overflowing_layer_is_named() -> None:
    vit = model(CONFIGS["svda"]).float()
    with torch.no_grad():
        family_of(vit).attention(vit)[1].value.weight.fill_(3e38)
    with pytest.raises(InvalidInput, match="layer 2 computed"):
        diagnose(vit, data(CONFIGS["svda"]))
