"""Laws of the map "hidden": removal of the hidden units of an MLP, and the compensation in its second map."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attnrx as rx
from attnrx.change.decompositions import BLOCK, DAMPING, compensated, unit_losses
from attnrx.decide.planning.cost_table import prescribed_costs
from attnrx.decide.rules.prescribing import HIDDEN_METRICS
from attnrx.vit.models import family_of
from support import cases
from support.comparisons import assert_text_and_files_give_the_same_model, pixels
from support.pretrained import VIT, of_timm

SHAPE: dict[str, Any] = {"width": 16, "depth": 3, "heads": 4, **cases.TINY}
FORMS = ("dense", "svda", "timm", "quick_gelu")
UNITS = {"dense": 32, "svda": 32, "timm": 64, "quick_gelu": 64}  # of every MLP


@pytest.fixture(scope="module")
def subjects() -> dict[str, tuple[nn.Module, rx.Diagnosis, Tensor]]:
    own: dict[str, nn.Module] = {form: cases.model(cases.ViTConfig.uniform(form, **SHAPE)) for form in FORMS[:2]}
    small = {"img_size": 8, "patch_size": 4, "depth": 3, "embed_dim": 16, "num_heads": 4, "num_classes": 3}
    own["timm"] = rx.load(of_timm(VIT, **small))
    own["quick_gelu"] = rx.load(of_timm(VIT, **small, act_layer="quick_gelu"))
    found = {}
    for form, model in own.items():
        channels = SHAPE["channels"] if form in FORMS[:2] else 3
        data = pixels(cases.ViTConfig.uniform("dense", **{**SHAPE, "channels": channels}), 48)
        images = torch.cat([batch.images for batch in data.batches(24)])
        found[form] = (model.double().eval(), rx.diagnose(model, data, moments=True), images.double())
    return found


@pytest.mark.parametrize("metric", HIDDEN_METRICS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("others", ["", "vo=total_rank:0.5 heads=total_rank:0.75"])
def test_mask_equals_compress_and_costs_are_exact(subjects, form: str, metric: str, others: str) -> None:
    model, diagnosis, images = subjects[form]
    given = rx.prescribe(diagnosis, f"{others} hidden=uniform_rank:0.6,metric={metric}")
    masked, small = (rx.realize(model, given, by=by) for by in ("mask", "compress"))
    torch.testing.assert_close(masked(images), small(images), rtol=1e-10, atol=1e-10)
    family, kept = family_of(small), round(0.6 * UNITS[form])
    assert [(first.out_features, second.in_features) for first, second in family.mlp(small)] == [(kept, kept)] * 3
    costs = family.costs(small)
    assert costs == prescribed_costs(model, given)
    assert costs.params == sum(parameter.numel() for parameter in small.parameters())
    mlp = [layer.mlp.macs for layer in costs.layers]
    assert mlp == [2 * kept * 16 * layer.tokens for layer in costs.layers]


@pytest.mark.parametrize("form", FORMS)
def test_text_and_files_give_the_same_model(subjects, form: str, tmp_path: Path) -> None:
    model, diagnosis, images = subjects[form]
    given = rx.prescribe(diagnosis, "hidden=energy_retention:0.9")
    small = rx.realize(model, given)
    expected = small(images)
    assert_text_and_files_give_the_same_model(model, diagnosis, given, images, tmp_path)
    loaded = rx.load(rx.save(small, tmp_path / "model", prescription=given))
    # Tables that are not saved, such as sinusoids, are made anew in another precision than in the fixture.
    torch.testing.assert_close(loaded(images), expected, rtol=1e-4, atol=1e-6)
    assert family_of(loaded).costs(loaded) == family_of(small).costs(small)


def test_layers_may_keep_different_numbers_of_units(subjects, tmp_path: Path) -> None:
    model, diagnosis, images = subjects["timm"]
    rule = "by_layer(uniform_rank:8; uniform_rank:1.0; uniform_rank:1)"
    given = rx.prescribe(diagnosis, f"hidden={rule}")
    small = rx.realize(model, given)
    assert [first.out_features for first, _ in family_of(small).mlp(small)] == [8, UNITS["timm"], 1]
    torch.testing.assert_close(rx.load(rx.save(small, tmp_path / "m"))(images), small(images), rtol=0, atol=0)
    again = rx.prescribe(rx.diagnose(small, images, moments=True), "hidden=uniform_rank:0.5")
    assert [int(layer.hidden.keep.sum()) for layer in again.layers if layer.hidden] == [4, 32, 0]
    masked, smaller = (rx.realize(small, again, by=by) for by in ("mask", "compress"))  # no unit: the mean remains
    torch.testing.assert_close(masked(images), smaller(images), rtol=1e-10, atol=1e-10)
    assert rx.load(rx.save(smaller, tmp_path / "none"))(images).isfinite().all()


@pytest.mark.parametrize("form", FORMS)
def test_the_compensation_is_the_ridge_regression_on_the_data(subjects, form: str) -> None:
    """The second map of the first layer has the weight and bias that minimize the penalized error of its output."""
    model, diagnosis, images = subjects[form]
    decided = rx.prescribe(diagnosis, "hidden=uniform_rank:0.5").layers[0].hidden
    assert decided is not None
    second: Any = family_of(model).mlp(model)[0][1]
    found: list[tuple[Tensor, Tensor]] = []
    handle = second.register_forward_hook(lambda _, given, output: found.append((given[0], output)))
    model(images)
    handle.remove()
    units, outputs = (part.flatten(0, 1) for part in found[0])
    kept = units[:, decided.keep]
    penalty = 0.1 * units.var(0, correction=0).mean()
    centered = kept - kept.mean(0)
    gram = centered.mT @ centered / len(kept) + penalty * torch.eye(kept.shape[1], dtype=kept.dtype)
    joint = centered.mT @ outputs / len(kept) + penalty * second.weight[:, decided.keep].mT
    weight = torch.linalg.solve(gram, joint).mT
    bias = outputs.mean(0) - weight @ kept.mean(0)
    torch.testing.assert_close(decided.weight, weight, rtol=1e-4, atol=1e-6)  # the moments are sums in float32
    torch.testing.assert_close(decided.bias, bias, rtol=1e-4, atol=1e-6)
    error = (outputs - kept @ decided.weight.mT - decided.bias).square().mean()
    plain = outputs - kept @ second.weight[:, decided.keep].mT
    assert error < (plain - plain.mean(0)).square().mean()


def test_every_step_removes_the_unit_of_the_smallest_error() -> None:
    """Rank-one updates find what a compensation for every candidate of every step finds, across deleted blocks."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(300, BLOCK + 6, generator=generator, dtype=torch.float64)
    features = features + 0.05 * features @ torch.randn(BLOCK + 6, BLOCK + 6, generator=generator, dtype=torch.float64)
    weight = torch.randn(5, BLOCK + 6, generator=generator, dtype=torch.float64)
    covariance = features.T.cov(correction=0)
    losses = unit_losses(covariance, weight, ridge=DAMPING)

    def error(removed: list[int]) -> float:
        keep = torch.ones(len(covariance), dtype=torch.bool)
        keep[removed] = False
        change = weight.clone()
        change[:, keep] -= compensated(covariance, weight, keep, ridge=DAMPING)
        return float(((change @ covariance) * change).sum())

    order, before, least = losses.argsort().tolist(), 0.0, 0.0
    for step, unit in enumerate(order):
        removed = order[: step + 1]
        now = error(removed)
        least = max(least, now - before)
        assert float(losses[unit]) == pytest.approx(least, rel=1e-4)
        if step % 9 == 0:
            best = min(error([*order[:step], other]) for other in order[step:])
            assert now == pytest.approx(best, rel=1e-9)
        before = now


def test_elimination_beats_the_controls(subjects) -> None:
    """On the images of the diagnosis the error of the first MLP is smallest for backward elimination."""
    _, diagnosis, _ = subjects["timm"]
    units = diagnosis.layers[0].hidden
    assert units is not None and units.covariance is not None

    def error(rule: str) -> float:
        decided = rx.prescribe(diagnosis, f"hidden={rule}").layers[0].hidden
        assert decided is not None and units.covariance is not None
        change = units.weight.clone()
        change[:, decided.keep] -= decided.weight
        return float(((change @ units.covariance) * change).sum())

    best = error("uniform_rank:0.5")
    others = [error("uniform_rank:0.5,metric=activation"), error("uniform_rank:0.5,metric=weights")]
    others += [error(f"random_matched(uniform_rank:0.5):seed={seed}") for seed in range(5)]
    assert best < min(others)


def test_directions_of_maps_are_those_of_the_model_that_was_diagnosed(subjects) -> None:
    """They are computed when they are read, and later changes of the weights do not matter."""
    model, diagnosis, _ = subjects["timm"]
    changed = copy.deepcopy(model)
    images = pixels(cases.ViTConfig.uniform("dense", **{**SHAPE, "channels": 3}), 48)
    later = rx.diagnose(changed, images, moments=True)
    with torch.no_grad():
        for weight in changed.parameters():
            weight.zero_()
    for before, after in zip(diagnosis.layers, later.layers, strict=True):
        for one, other in zip(before.mlp, after.mlp, strict=True):
            assert one is not None and other is not None and list(one.metrics) == list(other.metrics)
            for metric in one.metrics:
                torch.testing.assert_close(one.metrics[metric].strength, other.metrics[metric].strength)
