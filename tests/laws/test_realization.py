"""The master law: mask == compress, wherever the mathematics makes it exact; and keeping everything changes nothing."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from attnrx.change.realization import realize
from attnrx.data import ImageSet, Normalization, from_tensors
from attnrx.support.errors import FingerprintMismatch, InvalidInput, NotSupported, UnknownName
from attnrx.vit.attention import Attention
from attnrx.vit.attention.forms import SCORES, DenseForm, register_form
from attnrx.vit.models import family_of, observing
from attnrx.vit.spec import COMPRESSIONS, FORMS, Compression, FormTraits
from attnrx_lab.vision_transformer import TransformerConfig, VisionTransformer, full_spec
from support.cases import BY, CONFIGS, OWN, PATTERNS, images, model, own, prescription, with_heads, with_strength


def calibration(config: TransformerConfig) -> ImageSet:
    generator = torch.Generator().manual_seed(5)
    shape = (24, config.channels, config.image_size, config.image_size)
    pixels = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    normalization = Normalization((0.5,) * config.channels, (0.25,) * config.channels)
    return from_tensors("noise", pixels, torch.zeros(24, dtype=torch.long), normalization)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("config", OWN)
def test_exact_compression_equals_the_mask(config: str, pattern: str) -> None:
    vit = own(OWN[config])
    given = with_strength(prescription(vit, PATTERNS[pattern]), 0.7)
    inputs = images(OWN[config])
    masked = realize(vit, given, "mask")(inputs)
    compressed = realize(vit, given, "compress")(inputs)
    torch.testing.assert_close(compressed, masked, rtol=1e-10, atol=1e-10)
    # Which is the default, because no other compression keeps what the prescription kept.
    assert torch.equal(realize(vit, given)(inputs), compressed)


def edge_of(kind: str) -> VisionTransformer:
    """A model of SVDA whose strengths or rows are at the edge of what they can be."""
    vit = model(CONFIGS["svda-deep"])
    with torch.no_grad():
        for attention in family_of(vit).attention(vit):
            strength, query = attention.scores.get_parameter("strength"), attention.scores.query
            strength.copy_(
                {"negative": -strength.abs(), "largest": 1e38 * strength.sign(), "zero": 0 * strength}.get(
                    kind, strength
                )
            )
            if kind == "zero rows":
                query.weight[::2] = 0
                assert query.bias is not None
                query.bias[::2] = 0
    return vit


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("pattern", ["half", "ragged", "head-removed"])
@pytest.mark.parametrize("kind", ["negative", "largest", "zero", "zero rows"])
@torch.no_grad()
def test_exact_compression_equals_the_mask_at_the_edges(kind: str, pattern: str, dtype: torch.dtype) -> None:
    """In float32 both run on the C++ kernel."""
    vit, inputs = edge_of(kind).to(dtype), images(CONFIGS["svda-deep"]).to(dtype)
    given = prescription(vit, PATTERNS[pattern])
    masked = realize(vit, given, "mask")(inputs)
    compressed = realize(vit, given, "compress")(inputs)
    close = 1e-10 if dtype == torch.float64 else 1e-4
    torch.testing.assert_close(compressed, masked, rtol=close, atol=close)
    assert bool(masked.isfinite().all())


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("config", OWN)
def test_keeping_everything_changes_no_bit(config: str, by: str) -> None:
    vit = own(OWN[config])
    given, inputs = prescription(vit, PATTERNS["full"]), images(OWN[config])
    before = vit(inputs)
    assert torch.equal(realize(vit, given, "mask")(inputs), before)
    compressed = realize(vit, given, by, calibration(OWN[config]))
    assert torch.equal(compressed(inputs), before)


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("config", OWN)
def test_compression_is_physical(config: str, pattern: str, by: str) -> None:
    vit = own(OWN[config])
    given = prescription(vit, PATTERNS[pattern])
    small = realize(vit, given, by, calibration(OWN[config]))
    for attention, layer, before in zip(
        family_of(small).attention(small), given.layers, family_of(vit).attention(vit), strict=True
    ):
        spec = attention.spec
        assert sorted(spec.heads) == torch.nonzero(layer.heads).flatten().tolist()
        assert [layer.qk.ranks[head] for head in spec.heads] == list(spec.ranks)
        assert list(spec.ranks) == sorted(spec.ranks, reverse=True)
        assert spec.scale == before.spec.scale
        assert attention.scores.query.weight.shape[0] == sum(spec.rows)
        assert attention.value.weight.shape[0] == len(spec.heads) * spec.head_dim
        if by != "compress":
            assert sum(spec.rows) == sum(layer.qk.ranks)


@pytest.mark.parametrize(("pattern", "factor"), [("half", 1), ("ragged-falling", 1), ("half", 40)])
def test_refit_is_never_worse_than_renormalized_on_its_own_data(pattern: str, factor: int) -> None:
    """The objective is the variance of the score error under the original's attention, head by head."""
    config = CONFIGS["svda-deep"]
    vit, data = model(config), calibration(config)
    for attention in family_of(vit).attention(vit):
        with torch.no_grad():
            attention.scores.get_parameter("strength").mul_(factor)
    given = prescription(vit, PATTERNS[pattern])
    truth: list[torch.Tensor] = []
    errors = {}
    pixels = next(iter(data.batches(24))).images.double()
    with observing(vit, family_of(vit), lambda layer, seen: truth.append(seen.scores)), torch.no_grad():
        vit(pixels)
    for by in ("renormalized", "refit"):
        small = realize(vit, given, by, data)
        found: list[torch.Tensor] = []
        with observing(small, family_of(small), lambda layer, seen, to=found: to.append(seen.scores)), torch.no_grad():
            small(pixels)
        order = list(family_of(small).attention(small)[0].spec.heads)
        target = truth[0][:, order]  # only the first layer has the same tokens
        weight, difference = target.softmax(-1), found[0] - target
        centred = difference - (weight * difference).sum(-1, keepdim=True)
        errors[by] = (weight * centred.square()).sum((0, 2, 3))
    assert bool((errors["refit"] <= errors["renormalized"] * (1 + 1e-9)).all())


def test_refit_keeps_the_strengths_where_solved_ones_are_farther(monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIGS["svda"]
    vit, data, inputs = model(config), calibration(config), images(config)
    given = prescription(vit, PATTERNS["half"])
    farther = [layer.with_scores(replace(layer.qk, strength=-20 * layer.qk.strength)) for layer in given.layers]
    monkeypatch.setitem(COMPRESSIONS._things, "refit", replace(COMPRESSIONS["refit"], fit=lambda *_: farther))
    plain = realize(vit, given, by="renormalized")
    assert torch.equal(realize(vit, given, by="refit", calibration=data)(inputs), plain(inputs))


def test_a_form_is_registered_with_its_traits_scores_and_compressions(monkeypatch: pytest.MonkeyPatch) -> None:
    registry: Any
    for registry in (FORMS, SCORES, COMPRESSIONS):
        monkeypatch.setattr(registry, "_things", dict(registry._things))  # the others are restored afterwards
    kept = Compression(fit=lambda model, prescription, images: prescription.layers)
    traits = FormTraits(has_strengths=False, shares_directions=False, norms=("none",))
    register_form("plain", DenseForm, traits, {"plain": kept})
    spec = replace(full_spec("dense", 12, 3), form="plain")
    assert isinstance(Attention(spec).scores, DenseForm) and spec.traits is traits
    config = CONFIGS["dense"]
    vit, inputs = model(config), images(config)
    given = prescription(vit, PATTERNS["half"])
    small = realize(vit, given, "plain", calibration(config))
    assert torch.equal(small(inputs), realize(vit, given)(inputs))
    with pytest.raises(InvalidInput, match="by='plain' fits strengths"):
        realize(vit, given, "plain")


def test_the_original_stays_as_it_is() -> None:
    vit = model(CONFIGS["svda"])
    before = {name: tensor.clone() for name, tensor in vit.state_dict().items()}
    given = prescription(vit, PATTERNS["ragged"])
    realize(vit, given, "mask")
    realize(vit, given, "compress")
    assert all(torch.equal(tensor, before[name]) for name, tensor in vit.state_dict().items())


def test_rank_zero_is_not_a_removed_head() -> None:
    config = CONFIGS["svda"]
    vit, inputs = model(config), images(config)
    zero = realize(vit, prescription(vit, PATTERNS["zero"]))
    removed = prescription(vit, PATTERNS["zero"])
    layers = tuple(with_heads(layer, [False, True, True]) for layer in removed.layers)
    removed = replace(removed, layers=layers)
    assert not torch.allclose(realize(vit, removed)(inputs), zero(inputs))


def test_all_heads_can_go() -> None:
    config = CONFIGS["svda"]
    vit, inputs = model(config), images(config)
    given = prescription(vit, PATTERNS["full"])
    given = replace(given, layers=tuple(with_heads(layer, [False] * 3) for layer in given.layers))
    torch.testing.assert_close(realize(vit, given)(inputs), realize(vit, given, "mask")(inputs))


def test_a_compressed_model_can_be_compressed_again() -> None:
    config = CONFIGS["svda"]
    vit, inputs = model(config), images(config)
    once = realize(vit, prescription(vit, PATTERNS["ragged-falling"]), by="renormalized")
    twice = realize(once, _strongest(once, 1), by="renormalized")
    assert all(spec.ranks == (1, 1, 1) for spec in twice.config.attention)  # type: ignore[union-attr]
    assert torch.isfinite(twice(inputs)).all()
    with pytest.raises(NotSupported, match="compressed to ranks"):
        realize(once, _strongest(once, 1), "compress")


@pytest.mark.parametrize("name", ["dense", "svda"])
def test_a_mask_of_ragged_heads_removes_the_prescribed_directions(name: str) -> None:
    config = CONFIGS[name]
    ragged, inputs = realize(model(config), prescription(model(config), PATTERNS["ragged-falling"])), images(config)
    given = _strongest(ragged, 1)
    masked = realize(ragged, given, "mask")
    if name == "dense":
        torch.testing.assert_close(masked(inputs), realize(ragged, given)(inputs), rtol=1e-9, atol=1e-9)
    for before, after in zip(*(family_of(each).attention(each) for each in (ragged, masked)), strict=True):
        first = torch.arange(max(before.spec.ranks)) < 1
        table = (after.spectrum().query.abs().sum(-1) > 0) & (after.spectrum().strength != 0)
        assert torch.equal(table, before.spectrum().used & first)


def _strongest(vit, rank):
    given = prescription(vit, PATTERNS["full"])
    for layer, attention in zip(given.layers, family_of(vit).attention(vit), strict=True):
        layer.qk.keep[:] = False
        layer.qk.keep[:, :rank] = attention.spectrum().used[:, :rank]
    return given


def test_refusals() -> None:
    vit, other = model(CONFIGS["svda"]), model(CONFIGS["svda"], seed=9)
    given = prescription(vit, PATTERNS["half"])
    with pytest.raises(FingerprintMismatch, match="was made for the model"):
        realize(other, given)
    with pytest.raises(InvalidInput, match="calibration"):
        realize(vit, given, "refit")
    with pytest.raises(UnknownName, match=r"unknown compression 'prune'.*compress"):
        realize(vit, given, "prune")
