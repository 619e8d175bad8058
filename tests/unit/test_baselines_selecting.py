"""CORP, SnapViT and DiffRate: their equations, nested budgets, and costs of the realized models."""

import copy
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from attnrx.change.realization import realize
from attnrx.decide.diagnosing import diagnose
from attnrx.nouns.prescription import LayerPrescription
from attnrx.support.errors import NotSupported
from attnrx.vit.costs import count_params
from attnrx.vit.models import build_model, family_of
from attnrx.vit.tokens import parse_policy
from attnrx_lab.baselines import (
    PRESCRIBED,
    CorpBaseline,
    DiffRateBaseline,
    PrescribedBaseline,
    SnapVitBaseline,
    diffrate,
)
from attnrx_lab.baselines.corp import logit_compensation
from attnrx_lab.baselines.diffrate import differentiable_macs
from attnrx_lab.baselines.factoring import ATTENTION_MAPS, MLP_MAPS, linear_at
from attnrx_lab.baselines.snapvit import self_supervised_loss
from attnrx_lab.papers.sources import generated_splits
from attnrx_lab.vision_transformer import VisionTransformer
from support import cases
from support.comparisons import logits, pixels


def baseline(name: str, form: str = "dense") -> PrescribedBaseline:
    model, images = cases.model(cases.CONFIGS[form]), pixels(cases.CONFIGS[form], 8)
    return PRESCRIBED[name](model, diagnose(model, images, moments=True), images)


@pytest.mark.parametrize("name", PRESCRIBED)
def test_costs_are_those_of_the_realized_model_and_everything_kept_is_the_original(name: str) -> None:
    own = baseline(name)
    torch.testing.assert_close(logits(own.make(1.0), own.calibration), logits(own.model, own.calibration))
    assert own.costs(1.0).macs == family_of(own.model).costs(own.model).macs
    macs = []
    for share in (0.8, 0.5, 0.2, 1 / 4096):
        small, costs = own.make(share), own.costs(share)
        assert costs.params == count_params(small) and costs.macs == family_of(small).costs(small).macs
        assert logits(small, own.calibration).isfinite().all()
        macs.append(costs.macs)
    assert macs == sorted(macs, reverse=True) and len(set(macs)) == 4


def test_logit_compensation_solves_the_ridge_regression_of_the_removed_logits() -> None:
    torch.manual_seed(0)
    images, tokens, keep = 3, 9, torch.tensor([True, False, True, True, False])
    query, key = (torch.randn(images, tokens, 5, dtype=torch.float64) for _ in range(2))
    grams = query.mT @ query, key.mT @ key
    mix = logit_compensation(grams[0], grams[1], keep, penalty=1e-12)
    rows = torch.cat(
        [torch.kron(q[:, keep].contiguous(), k[:, keep].contiguous()) for q, k in zip(query, key, strict=True)]
    )
    removed = torch.cat([(q[:, ~keep] @ k[:, ~keep].T).flatten() for q, k in zip(query, key, strict=True)])
    expected = torch.linalg.lstsq(rows, removed[:, None]).solution.reshape(3, 3)
    torch.testing.assert_close(mix, expected, rtol=1e-7, atol=1e-9)
    # A large penalty leaves the removed logits away.
    assert logit_compensation(grams[0], grams[1], keep, penalty=1e9).abs().max() < 1e-6


def test_compensation_of_dimensions_that_repeat_the_others_is_exact() -> None:
    model = cases.model(cases.CONFIGS["dense"])
    with torch.no_grad():
        for attention in family_of(model).attention(model):
            for side in (attention.scores.query, attention.scores.key):
                for part in side.parameters():
                    rows = part.unflatten(0, (len(attention.spec.rows), -1))
                    half = rows.shape[1] // 2
                    rows[:, half:] = 0.3 * rows[:, :half].flip(1)
    images = pixels(cases.CONFIGS["dense"], 8)
    own = CorpBaseline(model, diagnose(model, images, moments=True), images)
    errors = []
    for fitted in (True, False):
        found = own.prescription(0.5, fitted)
        scores = replace(found, layers=tuple(LayerPrescription({"qk": layer.qk}) for layer in found.layers))
        errors.append(float((logits(realize(model, scores), images) - logits(model, images)).norm()))
    assert errors[0] < 0.1 * errors[1]


def test_importance_of_snapvit_is_half_the_squared_gradient_times_the_squared_weight() -> None:
    own = baseline("snapvit")
    assert isinstance(own, SnapVitBaseline)
    model = copy.deepcopy(own.model).eval()
    assert isinstance(model, VisionTransformer)
    heads, units = torch.zeros(len(own.attention[0].spec.rows)), torch.zeros(len(own.importance[0][1]))
    images = own.calibration.take(len(own.calibration))  # in the order of the baseline
    for number, batch in enumerate(images.batches(1)):
        views = own.views_of(batch.images.double(), number)
        model.zero_grad()
        self_supervised_loss(model(views)).backward()
        losses = {}
        for name in (*ATTENTION_MAPS, *MLP_MAPS):
            weight = linear_at(model, (0, name)).get_parameter("weight")
            gradient = weight.grad
            assert gradient is not None
            losses[name] = (gradient * weight).square().detach() / 2
        units = units + (losses["fc1"].sum(1) + losses["fc2"].sum(0)) / len(own.calibration)
        by_rows = (losses[name].sum(1).unflatten(0, (len(heads), -1)).sum(1) for name in ("query", "key", "value"))
        by_columns = losses["output"].sum(0).unflatten(0, (len(heads), -1)).sum(1)
        heads = heads + (sum(by_rows) + by_columns) / len(own.calibration)
    torch.testing.assert_close(own.importance[0][0], heads.double())
    torch.testing.assert_close(own.importance[0][1], units.double())


def test_smaller_budgets_of_snapvit_remove_what_larger_ones_remove() -> None:
    own = baseline("snapvit")
    assert isinstance(own, SnapVitBaseline)
    removed = [own.removed(share) for share in (0.9, 0.6, 0.3, 1 / 4096)]
    for larger, smaller in pairwise(removed):
        assert smaller[: len(larger)] == larger and len(smaller) > len(larger)
    least = own.prescription(1 / 4096).layers
    assert all(layer.hidden is not None and int(layer.hidden.keep.sum()) == 1 for layer in least)


SHAPE = {"image_size": 16, "patch_size": 4, "width": 16, "depth": 3, "heads": 2, "stem_channels": 4, "classes": 4}


def with_class_token() -> torch.nn.Module:
    return build_model("lvvit:t", classifies_patches=False, mlp_ratio=2.0, seed=0, **SHAPE).eval()


def test_macs_of_diffrate_are_those_of_a_schedule() -> None:
    model, policy = with_class_token(), parse_policy("tome:0.5@2")
    family = family_of(model)
    layout, depth = family.token_layout(model), len(family.attention(model))
    counts = torch.tensor([float(each) for each in policy.tokens(layout, depth)], dtype=torch.float64)
    expected = family.costs(model, tokens=policy)
    assert float(differentiable_macs(model)(counts)) == pytest.approx(expected.macs - expected.predictors.macs)


def test_the_schedule_of_diffrate_fits_its_share_and_follows_the_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diffrate, "STEPS", 3)
    model, images = with_class_token(), generated_splits("squares", 3, 4, 16).train
    before = family_of(model).costs(model).macs
    own = DiffRateBaseline(model, images)
    share = own.share_within(round(0.85 * before))
    assert share is not None and own.share_within(1) is None
    small = own.make(share)
    assert own.make(share) is small and own.costs(share).macs == family_of(small).costs(small).macs <= 0.85 * before
    assert logits(small, images).isfinite().all()
    policy = own.policy(share)
    assert parse_policy(str(policy)) == policy and own.costs(1.0).macs == before
    learned, uniform = own.learned_shares(share), own.uniform_ratio(share)
    assert learned[0] != pytest.approx(uniform)
    # A uniform schedule would leave the last layer with half a patch, and every stage keeps one.
    assert own.uniform_ratio(0.61) ** 2 * 16 < 1 and own.least < 0.61  # type: ignore[operator]
    assert own.costs(0.61).macs <= 0.61 * before
    with pytest.raises(NotSupported, match="class token"):
        DiffRateBaseline(cases.model(cases.CONFIGS["dense"]), images)
