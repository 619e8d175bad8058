"""Rewritten directions: full rank == original, mask == compress, nested, and best in their own metric."""

import itertools

import pytest
import torch
from torch import nn

from attnrx.change.realization import realize
from attnrx.data import ImageSet
from attnrx.decide.diagnosing import diagnose
from attnrx.decide.diagnostics import suited_diagnostics
from attnrx.decide.rules import METRICS, EnergyRetention, Rule, TotalRank, UniformRank, in_metric, prescribe_maps
from attnrx.nouns.diagnosis import Diagnosis
from attnrx.nouns.prescription import Prescription
from attnrx.vit.maps import OUTPUT_MAPS
from attnrx.vit.models import family_of, observing
from attnrx_lab.rules import DivergenceRank, FusionRank, JointMoments, SharedRank, TopRank, measure_divergence
from attnrx_lab.vision_transformer import VisionTransformer
from support import cases
from support.comparisons import logits, pixels, whole

DENSE = cases.CONFIGS["dense"]


@pytest.fixture(scope="module")
def model() -> VisionTransformer:
    return cases.model(DENSE)


@pytest.fixture(scope="module")
def images() -> ImageSet:
    return pixels(DENSE, 16)


@pytest.fixture(scope="module")
def found(model: VisionTransformer, images: ImageSet) -> Diagnosis:
    spectra = tuple(layer.spectrum() for layer in family_of(model).attention(model))
    return diagnose(model, images, batch_size=8, diagnostics=(*suited_diagnostics(spectra), JointMoments()))


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("by", ["mask", "compress"])
def test_all_directions_in_any_metric_are_the_original(
    metric: str, by: str, model: VisionTransformer, found: Diagnosis, images: ImageSet
) -> None:
    layers = whole(found, metric)
    realized = realize(model, Prescription(layers, {}, found.fingerprint, {}), by=by)
    torch.testing.assert_close(logits(realized, images), logits(model, images), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("rule", [TotalRank(0.5), UniformRank(2), EnergyRetention(0.8)], ids=str)
def test_mask_equals_compress(
    metric: str, rule: Rule, model: VisionTransformer, found: Diagnosis, images: ImageSet
) -> None:
    prescription = prescribe_maps(found, in_metric(rule, metric))
    masked, small = (logits(realize(model, prescription, by=by), images) for by in ("mask", "compress"))
    torch.testing.assert_close(masked, small, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(masked, logits(model, images), rtol=1e-6)


@pytest.mark.parametrize("name", OUTPUT_MAPS)
@pytest.mark.parametrize("rule", [TotalRank(0.6), UniformRank(0.5), UniformRank(0.5, metric="weights")], ids=str)
def test_other_maps_masked_equal_compressed(
    name: str, rule: Rule, model: VisionTransformer, found: Diagnosis, images: ImageSet
) -> None:
    prescription = prescribe_maps(found, {name: rule})
    masked, small = (realize(model, prescription, by=by) for by in ("mask", "compress"))
    torch.testing.assert_close(logits(masked, images), logits(small, images), rtol=1e-10, atol=1e-10)
    assert not torch.allclose(logits(small, images), logits(model, images), rtol=1e-6)
    assert parameters(masked) == parameters(model) > parameters(small)


@pytest.mark.parametrize("joint", ["weights", "augmented", "centered"])
def test_enough_shared_directions_are_the_original(
    joint: str, model: VisionTransformer, found: Diagnosis, images: ImageSet
) -> None:
    # All directions of all heads, each used by its own head alone: where least squares starts, it cannot leave.
    realized = realize(model, prescribe_maps(found, SharedRank(1.0, "cp", joint)))
    expected = model if joint != "weights" else None
    if expected is not None:
        torch.testing.assert_close(logits(realized, images), logits(expected, images), rtol=1e-8, atol=1e-8)
    assert all(layer.spec.form == "shared" for layer in family_of(realized).attention(realized))


@pytest.mark.parametrize("metric", ["augmented", "weights"])
def test_fusion_ranks_are_realized_as_irregular_heads(
    metric: str, model: VisionTransformer, found: Diagnosis, images: ImageSet
) -> None:
    prescription = prescribe_maps(found, FusionRank(6, metric=metric))
    assert all(sum(ranks) <= 6 for ranks in prescription.ranks)
    masked, small = (logits(realize(model, prescription, by=by), images) for by in ("mask", "compress"))
    torch.testing.assert_close(masked, small, rtol=1e-10, atol=1e-10)


def test_everything_at_once_survives_the_disk(
    tmp_path, model: VisionTransformer, found: Diagnosis, images: ImageSet
) -> None:
    rule = UniformRank(0.5)
    prescription = prescribe_maps(found, {"qk": TotalRank(0.75), **dict.fromkeys(OUTPUT_MAPS, rule)})
    again = Prescription.load(prescription.save(tmp_path / "prescription.json"))
    first, second = (logits(realize(model, each), images) for each in (prescription, again))
    assert torch.equal(first, second)


def test_measured_divergences_fall_to_zero_and_price_the_ranks(
    model: VisionTransformer, found: Diagnosis, images: ImageSet
) -> None:
    measured = measure_divergence(model, found, images)
    for layer in measured.layers:
        price = layer.reading("divergence_mix")
        assert price.shape == (3, 5)
        assert float(price[:, -1].max()) < 1e-12 < float(price[:, 0].min())
    rule = DivergenceRank(0.5)
    ranks = prescribe_maps(measured, rule).ranks
    assert all(sum(own) == 6 for own in ranks)
    for own, layer in zip(ranks, measured.layers, strict=True):
        price = layer.reading("divergence_mix")
        best = min(
            sum(float(price[head, rank]) for head, rank in enumerate(each))
            for each in itertools.product(range(1, 5), repeat=3)
            if sum(each) == 6
        )
        assert sum(float(price[head, rank]) for head, rank in enumerate(own)) == pytest.approx(best, abs=1e-12)


def test_a_divergence_is_that_of_the_realized_layer(
    model: VisionTransformer, found: Diagnosis, images: ImageSet
) -> None:
    """Column r is what the first layer loses when all its heads are cut at rank r."""
    measured = measure_divergence(model, found, images).layers[0].reading("divergence_mix")
    for rank in (0, 2):
        small = realize(model, prescribe_maps(found, TopRank(rank, metric="mix")))
        attention = [sampled(each, images) for each in (model, small)]
        order = family_of(small).attention(small)[0].spec.heads
        change = (attention[0] * (attention[0].log() - attention[1][:, list(order)].log())).sum(-1).mean((0, 2))
        torch.testing.assert_close(change, measured[:, rank], rtol=1e-9, atol=1e-12)


def sampled(model: nn.Module, images: ImageSet) -> torch.Tensor:
    seen: list[torch.Tensor] = []
    with observing(model, family_of(model), lambda layer, each: None if layer else seen.append(each.attention)):
        logits(model, images)
    return torch.cat(seen)
