"""The bounds check as a reader of findings sees it: what counts, where it is read from, what is refused."""

import copy
from dataclasses import replace

import pytest
import torch

from attnrx.nouns.evidence import Finding
from attnrx.show.checks import Comparison
from attnrx.support.errors import FingerprintMismatch
from attnrx.vit.models import family_of
from attnrx_lab import svda_attention
from attnrx_lab.checks import Bounds
from attnrx_lab.checks.bounds import SpectralChange, equal_heads
from attnrx_lab.vision_transformer import VisionTransformer
from support.cases import PATTERNS, pixels, prescription
from support.comparisons import Setting, weakest_removed


def change(before: list[float], after: list[float], stays: bool = True) -> SpectralChange:
    return SpectralChange.between(torch.tensor([before]), torch.tensor([after]), torch.tensor([stays]))


def test_a_head_counts_when_it_loses_something_and_stays():
    assert bool(change([1.0, 2.0], [0.0, 2.0]).counted)
    assert not bool(change([1.0, 2.0], [1.0, 2.0]).counted)
    assert not bool(change([1.0, 2.0], [0.0, 0.0], stays=False).counted)


def test_equation_13_speaks_of_heads_that_lost_their_weakest_directions_only():
    weakest = change([1.0, -2.0, 3.0], [0.0, -2.0, 3.0])
    assert bool(weakest.thresholded)
    assert float(weakest.threshold) == 2
    assert not bool(change([1.0, -2.0, 3.0], [1.0, 0.0, 3.0]).thresholded)
    assert not bool(change([1.0, -2.0, 3.0], [0.0, -1.0, 2.0]).thresholded)  # soft threshold: the kept ones change too
    emptied = change([1.0, -2.0], [0.0, 0.0])
    assert bool(emptied.thresholded)
    assert float(emptied.threshold) == 2


def test_without_either_only_what_concerns_the_reference_alone_is_claimed():
    setting = Setting.of("svda")
    findings = Bounds(images=4)(replace(setting.comparison(setting.compressed), prescription=None))
    assert {f.details["quantity"] for f in findings} == {"Proposition 4", "Eq. 25"}


def test_findings_say_how_near_the_bound_is_reached():
    setting = Setting.of("svda-deep")
    findings = Bounds(images=8)(setting.comparison(setting.compressed, images=40))
    for finding in findings:
        # Heads of Eq. 25, the first image of the only batch for a rank, and all images otherwise.
        assert finding.n == {"Eq. 25": 6, "Proposition 3": 1}.get(finding.details["quantity"], 8)
        assert finding.limit == 1
    theorem = next(f for f in findings if f.details["quantity"] == "Theorem 1, Eq. 12")
    assert 0 < theorem.value <= 1


def test_rows_that_are_not_of_unit_length_are_caught(monkeypatch: pytest.MonkeyPatch):
    """A defect of the attention, planted: without the norms Theorem 1 does not hold, and the check must say so."""
    monkeypatch.setattr("attnrx_lab.svda_attention.unit_rows", lambda rows, width=None: 10 * rows)
    setting = Setting.of("svda-deep")
    setting = Setting(setting.reference, weakest_removed(setting.reference, 6))
    findings = Bounds(images=8)(setting.comparison(setting.reference, images=8))
    broken = {f.details["quantity"] for f in findings if f.outcome == "fails"}
    assert "Theorem 1, Eq. 12" in broken


def test_the_result_does_not_depend_on_the_batches(monkeypatch: pytest.MonkeyPatch):
    setting = Setting.of("svda")
    comparison = setting.comparison(setting.compressed, images=12)
    at_once = Bounds(images=12)(comparison)
    monkeypatch.setattr("attnrx_lab.checks.bounds.BATCH", 5)
    for whole, cut in zip(at_once, Bounds(images=12)(comparison), strict=True):
        assert cut.value == pytest.approx(whole.value, rel=1e-9)


def with_equal_heads(setting: Setting) -> VisionTransformer:
    """The reference, in whose first layer the second head has the weights of the first."""
    model = copy.deepcopy(setting.reference)
    layer = family_of(model).attention(model)[0]
    directions, features = layer.spec.ranks[0], layer.spec.value_dims[0]
    with torch.no_grad():
        for side, count in ((layer.scores.query, directions), (layer.scores.key, directions), (layer.value, features)):
            for rows in side.parameters():
                rows[count : 2 * count] = rows[:count]
        layer.output.weight[:, features : 2 * features] = layer.output.weight[:, :features]
        strengths = layer.scores.get_parameter("strength")
        strengths[directions : 2 * directions] = strengths[:directions]
    return model


def proposition_5_of(model: VisionTransformer) -> list[Finding]:
    findings = Bounds(images=6)(Comparison(model, model, pixels(model.config, 6)))
    return [finding for finding in findings if finding.details["quantity"] == "Proposition 5"]


def test_equal_heads_add_the_same_and_others_are_not_compared(monkeypatch: pytest.MonkeyPatch):
    setting = Setting.of("svda-deep")
    model = with_equal_heads(setting)
    layer = family_of(model).attention(model)[0]
    assert equal_heads(layer) == [(0, 1)] and equal_heads(family_of(model).attention(model)[1]) == []
    assert proposition_5_of(setting.reference) == []
    (finding,) = proposition_5_of(model)
    assert finding.outcome == "holds" and finding.value < 1e-6 and finding.n == 6
    # A defect of the attention, planted: the rows of a head depend on its place.
    rows = svda_attention.unit_rows

    def by_place(values: torch.Tensor, width: int | None = None) -> torch.Tensor:
        return rows(values, width) * torch.linspace(1, 2, values.shape[-2], dtype=values.dtype)[:, None]

    with monkeypatch.context() as planted:
        planted.setattr("attnrx_lab.svda_attention.unit_rows", by_place)
        (finding,) = proposition_5_of(model)
        assert finding.outcome == "fails" and finding.value > 1
    with torch.no_grad():
        layer.scores.get_parameter("strength")[-1] += 1e-9  # equal to every printed digit, and not identical
    assert proposition_5_of(model) == []


def test_float32_models_reach_their_bounds_and_hold_them():
    """With one direction a row is 1 or -1, so every score moves by exactly its bound: rounding must not condemn it."""
    setting = Setting.of("svda-one-direction", "zero")
    reference = setting.reference.float()
    comparison = replace(
        setting.comparison(reference, images=8), prescription=prescription(reference, PATTERNS["zero"])
    )
    findings = Bounds(images=8)(comparison)
    theorem = next(f for f in findings if f.details["quantity"] == "Theorem 1, Eq. 12")
    assert theorem.value == pytest.approx(1, abs=1e-6)
    assert all(f.outcome == "holds" for f in findings)


def test_what_belongs_to_another_model_is_refused():
    setting, other = Setting.of("svda"), Setting.of("svda-deep")
    with pytest.raises(FingerprintMismatch):
        Bounds(images=4)(replace(setting.comparison(setting.compressed), prescription=other.prescription))
