"""Factoring baselines: exact at full rank, costed as they run, calibrated on the real inputs of every map."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import attnrx as rx
from attnrx.change.realization import realize
from attnrx.data import ImageSet
from attnrx.data.model_data import images_for
from attnrx.decide.diagnosing import diagnose
from attnrx.decide.rules.prescribing import prescribe
from attnrx.support.errors import NotSupported
from attnrx.vit.attention import Eager, using
from attnrx.vit.attention.head_linear import HeadLinear, PackedWeights
from attnrx.vit.costs import count_params, count_product_macs
from attnrx.vit.models import family_of
from attnrx_lab.baselines import (
    DECOMPOSED,
    FACTORS,
    FactoringBaseline,
    MapStatistics,
    TorchPruningBaseline,
    TuckerBaseline,
)
from attnrx_lab.baselines.factoring import (
    FactoredHeads,
    LowRank,
    linear_at,
    map_addresses,
    svd,
    weights_at,
    with_factors,
)
from attnrx_lab.comparison.methods import Method, MethodBench
from attnrx_lab.decompositions import FactoredTensor, tucker_terms
from attnrx_lab.vision_transformer import VisionTransformer
from support import cases
from support.comparisons import logits, pixels

CONFIGS = ("dense", "svda")


def model_of(name: str) -> VisionTransformer:
    return cases.model(cases.CONFIGS[name])


def test_baselines_change_a_model_of_a_library() -> None:
    """`load` returns the library's own module, whose attention is one map for query, key and value."""
    torch.manual_seed(0)
    timm = pytest.importorskip("timm")
    shape = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 24, "num_heads": 3, "num_classes": 5}
    model = rx.load(timm.create_model("vit_tiny_patch16_224", **shape).eval())
    pixels = torch.randn(16, 3, 32, 32)
    images = images_for(model, pixels, "calibration")
    bench = MethodBench(model, rx.diagnose(model, images), images, images)
    for name in FACTORS:
        made = bench.compressor(Method.parse(f"x=baseline:{name}")).make(0.5)
        with torch.no_grad():
            assert (made(pixels) - model(pixels)).abs().max() > 1e-4
        assert sum(each.numel() for each in made.parameters()) < sum(each.numel() for each in model.parameters())


def statistics_of(model: VisionTransformer, images: ImageSet) -> MapStatistics:
    return MapStatistics(model, images, 4)


@pytest.mark.parametrize("name", CONFIGS)
def test_all_directions_of_every_map_are_the_original(name: str) -> None:
    model, images = model_of(name), pixels(cases.CONFIGS[name], 8)
    whole = {address: svd(*weights_at(model, address)) for address in map_addresses(model)}
    small = with_factors(model, whole)
    torch.testing.assert_close(logits(small, images), logits(model, images), rtol=1e-9, atol=1e-9)
    layers = family_of(small).attention(small)
    with using(layers, [Eager()] * len(layers)):
        torch.testing.assert_close(logits(small, images), logits(model, images), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("pattern", ["ragged", "half"])
def test_heads_of_different_ranks_are_padded_after_the_factors(pattern: str) -> None:
    whole, images = model_of("dense"), pixels(cases.CONFIGS["dense"], 8)
    model = realize(whole, cases.prescription(whole, cases.PATTERNS[pattern]))
    halved = realize(whole, prescribe(diagnose(whole, images, batch_size=8), "vo=total_rank:0.6"))
    for source in (model, halved):
        small = with_factors(source, {address: svd(*weights_at(source, address)) for address in map_addresses(source)})
        torch.testing.assert_close(logits(small, images), logits(source, images), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", FACTORS)
def test_a_baseline_computes_with_its_truncated_maps_and_costs_what_it_says(kind: str) -> None:
    model, images = model_of("dense"), pixels(cases.CONFIGS["dense"], 8)
    baseline = FactoringBaseline(model, kind, statistics_of(model, images))
    small, costs = baseline.make(0.7), baseline.costs(0.7)
    assert costs.params == count_params(small) < count_params(model)
    layers = family_of(small).attention(small)
    with using(layers, [Eager()] * len(layers)):
        assert costs.product_macs == count_product_macs(small, next(iter(images.batches(8))).images.double())
    # The same model with its matrices multiplied out: nothing but the ranks has changed.
    multiplied = with_products(
        model, {address: baseline.factors_at(address).truncated(rank) for address, rank in baseline.ranks(0.7).items()}
    )
    torch.testing.assert_close(logits(small, images), logits(multiplied, images), rtol=1e-9, atol=1e-9)
    assert not torch.allclose(logits(small, images), logits(model, images), rtol=1e-4)


def with_products(model: VisionTransformer, factors: dict[tuple[int, str], LowRank]) -> nn.Module:
    dense = cases.model(model.config)
    with torch.no_grad():
        for address, low_rank in factors.items():
            linear_at(dense, address).get_parameter("weight").copy_(low_rank.weight)
    return dense


def test_every_map_keeps_at_most_its_share_and_more_share_costs_more() -> None:
    model = model_of("dense")
    baseline = FactoringBaseline(model, "svd", statistics_of(model, pixels(cases.CONFIGS["dense"], 4)))
    for (layer, name), rank in baseline.ranks(0.6).items():
        outputs, inputs = linear_at(model, (layer, name)).get_parameter("weight").shape
        assert rank * (outputs + inputs) <= 0.6 * outputs * inputs < (rank + 1) * (outputs + inputs)
    spent = [baseline.costs(share).macs for share in (0.3, 0.6, 0.9)]
    assert all(less < more for less, more in pairwise(spent))


def test_moments_are_those_of_what_goes_in() -> None:
    model, images = model_of("dense"), pixels(cases.CONFIGS["dense"], 6)
    seen: dict[tuple[int, str], list[torch.Tensor]] = {}
    data = statistics_of(model, images)
    handles = [
        linear_at(model, address).register_forward_hook(
            lambda _, given, outputs, address=address: seen.setdefault(address, []).append(given[0].flatten(0, -2))
        )
        for address in map_addresses(model)
    ]
    layers = family_of(model).attention(model)
    with using(layers, [Eager()] * len(layers)):
        logits(model, images)
    for handle in handles:
        handle.remove()
    for address in map_addresses(model):
        inputs = torch.cat(seen[address])
        torch.testing.assert_close(data.moments(address).magnitude, inputs.abs().mean(0))
        torch.testing.assert_close(data.moments(address).moment, inputs.mT @ inputs / len(inputs))
    assert not data.moments((0, "output")).moment.equal(data.moments((0, "value")).moment)


def test_fisher_information_is_of_the_models_own_answers_image_by_image() -> None:
    model, images = model_of("dense"), pixels(cases.CONFIGS["dense"], 5)
    data = statistics_of(model, images)
    expected = {address: torch.zeros_like(weights_at(model, address)[0]) for address in map_addresses(model)}
    own = []
    for batch in images.batches(1):
        model.zero_grad()
        answer = model(batch.images.double())
        own.append(int(answer.argmax()) == int(batch.labels))
        F.nll_loss(answer.log_softmax(-1), answer.argmax(-1)).backward()
        for address, total in expected.items():
            gradient = linear_at(model, address).get_parameter("weight").grad
            assert gradient is not None
            total += gradient.square() / 5
    assert not all(own)  # the labels of the data would say something else
    for address, total in expected.items():
        torch.testing.assert_close(data.fisher(address), total)


def test_torch_pruning_costs_what_it_says_and_leaves_the_width() -> None:
    pytest.importorskip("torch_pruning", reason="torch-pruning is not installed: pip install 'attnrx[baselines]'")
    timm = pytest.importorskip("timm", reason="timm is not installed")
    from attnrx.vit.models import load_model

    torch.manual_seed(0)
    source = timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=48, depth=2, num_heads=3, num_classes=5)
    model = load_model(source.eval())
    shape = cases.ViTConfig.uniform(
        "dense", width=12, depth=1, heads=3, image_size=32, patch_size=16, channels=3, classes=5
    )
    images = pixels(shape, 8)
    baseline = TorchPruningBaseline(model, images, 4)
    batch = next(iter(images.batches(8))).images.double()
    with torch.no_grad():
        torch.testing.assert_close(baseline.make(1.0)(batch), model(batch), rtol=1e-4, atol=1e-5)
    assert baseline.costs(1.0) == family_of(model).costs(model)
    small = baseline.make(0.5)
    assert [layer.spec.ranks for layer in family_of(small).attention(small)] == [(8, 8, 8)] * 2
    assert baseline.costs(0.5).params == count_params(small)
    assert baseline.costs(0.5).macs == family_of(small).costs(small).macs < family_of(model).costs(model).macs
    assert count_params(baseline.make(1 / 4096)) < count_params(small)
    with pytest.raises(NotSupported, match="uncompressed"):
        TorchPruningBaseline(small, images)


@pytest.mark.parametrize("kind", DECOMPOSED)
@pytest.mark.parametrize("share", [0.5, 0.8])
def test_tucker_scores_are_those_of_the_formed_terms_and_cost_what_they_say(kind: str, share: float) -> None:
    model, images = model_of("dense"), pixels(cases.CONFIGS["dense"], 8)
    baseline = TuckerBaseline(model, diagnose(model, images, batch_size=8), kind)
    small, costs = baseline.make(share), baseline.costs(share)
    assert costs.params == count_params(small)
    layers = family_of(small).attention(small)
    with using(layers, [Eager()] * len(layers)):
        assert costs.product_macs == count_product_macs(small, next(iter(images.batches(8))).images.double())
    tokens = torch.randn(2, 5, model.config.width, dtype=torch.float64)
    for layer, own in zip(layers, family_of(model).attention(model), strict=True):
        spectrum, heads = own.spectrum(), len(own.spec.heads)
        tensor = FactoredTensor(spectrum.query, spectrum.key[..., :-1])
        terms, rank = baseline._shape(own.spec, share)
        found = tucker_terms(tensor, terms, (rank, rank, heads))
        dense = torch.stack([term.dense() for term in found]).sum(0)
        augmented = torch.cat([tokens, torch.ones(2, 5, 1, dtype=torch.float64)], -1)
        expected = torch.einsum("bia,ach,bjc->bhij", augmented, dense, tokens)
        query, key = (side(tokens).unflatten(-1, (heads, -1)) for side in (layer.scores.query, layer.scores.key))
        torch.testing.assert_close(torch.einsum("bihr,bjhr->bhij", query, key), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", DECOMPOSED)
def test_all_of_tucker_is_the_original(kind: str) -> None:
    """One term of full ranks is the tensor itself; of several, each is as large as the tensor at this share."""
    model, images = model_of("dense"), pixels(cases.CONFIGS["dense"], 8)
    baseline = TuckerBaseline(model, diagnose(model, images, batch_size=8), kind)
    if kind == "tucker":
        torch.testing.assert_close(logits(baseline.make(1.0), images), logits(model, images), rtol=1e-9, atol=1e-9)
    spent = [baseline.costs(share).macs for share in (0.3, 0.6, 0.9)]
    assert all(less < more for less, more in pairwise(spent))


@pytest.mark.parametrize("kind", DECOMPOSED)
def test_tucker_changes_a_model_of_a_library(kind: str) -> None:
    torch.manual_seed(0)
    timm = pytest.importorskip("timm")
    shape = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 24, "num_heads": 3, "num_classes": 5}
    model = rx.load(timm.create_model("vit_tiny_patch16_224", **shape).eval())
    inputs = torch.randn(16, 3, 32, 32)
    images = images_for(model, inputs, "calibration")
    bench = MethodBench(model, rx.diagnose(model, images), images, images)
    made = bench.compressor(Method.parse(f"x=baseline:{kind}")).make(0.5)
    with torch.no_grad():
        assert (made(inputs) - model(inputs)).abs().max() > 1e-4


def test_tucker_needs_plain_scores() -> None:
    model, images = model_of("svda"), pixels(cases.CONFIGS["svda"], 8)
    with pytest.raises(NotSupported, match="plain dot products"):
        TuckerBaseline(model, diagnose(model, images, batch_size=8), "tucker")


def test_projections_that_compute_something_else_are_not_packed() -> None:
    """On a device other than a CPU weights of plain projections share memory; a subclass's have other shapes."""
    with torch.device("meta"):
        plain = [HeadLinear(6, (2, 2)) for _ in range(3)]
        assert PackedWeights.of_(plain) is not None
        assert PackedWeights.of_([FactoredHeads(plain[0], 3), *plain[1:]]) is None
