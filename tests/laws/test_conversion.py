"""Laws of the conversion to SVDA: directions of the scores, repaired to the original, an ordinary SVDA model."""

from pathlib import Path

import pytest
import torch

import attnrx as rx
from attnrx.change.realization.repair import Repair
from attnrx.vit.models import family_of
from attnrx_lab.conversion import to_svda
from support import cases
from support.pretrained import BLOCKS, adopted_once, inputs

# Forms that are not plain dot products.
OTHER = ("rotary", "dinov3", "eva", "bias", "beit", "relative", "perception", "norm", "swin", "rope")


@pytest.mark.parametrize("name", [name for name in BLOCKS if not any(part in name.lower() for part in OTHER)])
def test_every_plain_architecture_is_converted_and_repaired(name: str) -> None:
    family, _, model = adopted_once(name)
    if any(not attention.spec.is_plain or attention.spec.inner_norms for attention in family.attention(model)):
        pytest.skip("its attention is not plain")
    images = inputs(model, 32)
    found = to_svda(model, images)
    assert all(attention.spec.form == "svda" for attention in family_of(found).attention(found))
    if not family.mlp(model):
        return
    repaired = rx.repair(found, model, images, Repair(steps=20))
    assert all(after <= before for before, after in zip(repaired.before, repaired.after, strict=True))


def test_strengths_are_positive_and_sorted() -> None:
    model = cases.model(cases.CONFIGS["dense"])
    images = inputs(model, 64)
    found = to_svda(model, images)
    for layer in family_of(found).attention(found):
        strengths = layer.scores.strengths().detach().view(len(layer.spec.heads), -1)
        assert bool((strengths >= 0).all()) and bool((strengths.diff(dim=-1) <= 0).all())


def test_without_norms_the_scores_are_those_of_the_original_up_to_a_constant_per_query() -> None:
    model = cases.model(cases.CONFIGS["dense"])
    found = to_svda(model, inputs(model, 64))
    for before, after in zip(*(family_of(each).attention(each) for each in (model, found)), strict=True):
        old, new = before.spectrum(), after.spectrum()
        expected = old.query.mT @ old.key
        weights = new.query.mT @ (new.strength[..., None] * new.key)
        # The last column of a product is the same for all keys.
        torch.testing.assert_close(weights[..., :-1], expected[..., :-1], rtol=1e-6, atol=1e-6)


def test_it_is_diagnosed_pruned_repaired_and_saved(tmp_path: Path) -> None:
    model = cases.model(cases.CONFIGS["dense"])
    images = inputs(model, 512)
    found = to_svda(model, images)
    repaired = rx.repair(found, model, images, Repair(steps=150))
    assert sum(repaired.after) < sum(repaired.before)
    loaded = rx.load(rx.save(repaired.model, tmp_path / "svda"))
    torch.testing.assert_close(loaded(images), repaired.model(images), rtol=1e-10, atol=1e-10)
    given = rx.prescribe(rx.diagnose(loaded, images), "energy_retention:0.8")
    small, masked = rx.realize(loaded, given), rx.realize(loaded, given, by="mask")
    torch.testing.assert_close(small(images), masked(images), rtol=1e-9, atol=1e-9)
    assert sum(sum(layer.spec.ranks) for layer in family_of(small).attention(small)) < 2 * 12
