"""Matched controls: paired, over images and draws, and able to condemn a prescription."""

from functools import partial

import pytest
import torch
from torch import nn

from attnrx.change.realization import realize
from attnrx.nouns.evidence import Finding
from attnrx.nouns.prescription import Prescription
from attnrx_lab.checks import Controls
from attnrx_lab.checks.controls import resample_draws, spread
from support import cases
from support.comparisons import Setting, weakest_removed

RANDOM = 6


@pytest.fixture
def setting() -> Setting:
    reference = Setting.of("svda-deep", spread=0.5).reference
    return Setting(reference, weakest_removed(reference, 4))


def controls(setting: Setting) -> dict[str, tuple[Prescription, ...]]:
    """Random directions, and the strongest: the keep of the weakest half, turned around."""
    strongest = tuple(
        layer.with_scores(cases.replace(layer.qk, keep=~layer.qk.keep)) for layer in setting.prescription.layers
    )
    random = (cases.prescription(setting.reference, cases.PATTERNS["half"], seed) for seed in range(RANDOM))
    return {"random": tuple(random), "largest": (cases.replace(setting.prescription, layers=strongest),)}


def masking(setting: Setting, prescription: Prescription) -> nn.Module:
    return realize(setting.reference, prescription, by="mask")


def found(setting: Setting, candidate: nn.Module, images: int = 60) -> dict[tuple[str, str], Finding]:
    check = Controls(controls(setting), partial(masking, setting))
    findings = check(setting.comparison(candidate, images=images))
    return {(finding.details["kind"], finding.details["quantity"]): finding for finding in findings}


def test_removing_the_weakest_beats_removing_the_strongest(setting: Setting):
    findings = found(setting, setting.masked)
    largest = findings["largest", "discrepancy"]
    assert largest.outcome == "holds"
    assert largest.low is not None and 0 < largest.low <= largest.value
    assert largest.value == pytest.approx(largest.details["control"] - largest.details["candidate"])
    assert findings["random", "discrepancy"].outcome == "reported"


def test_the_claim_fails_for_a_candidate_that_is_the_control(setting: Setting):
    (strongest,) = controls(setting)["largest"]
    largest = found(setting, masking(setting, strongest))["largest", "discrepancy"]
    assert largest.value == 0
    assert largest.outcome == "fails"


def test_every_draw_is_told_with_its_spread(setting: Setting):
    random = found(setting, setting.masked)["random", "accuracy"]
    draws = random.details["draws"]
    assert len(draws) == RANDOM
    assert random.details["deviation"] == pytest.approx(float(torch.tensor(draws).std()))
    assert random.value == pytest.approx(random.details["candidate"] - sum(draws) / RANDOM)
    assert random.unit == "points"


def test_the_interval_knows_that_the_draws_are_a_sample():
    """Controls that differ between draws but not between images: only drawing them anew shows it."""
    drawn = torch.arange(10.0).view(1, 10, 1).expand(4000, 10, 3)
    means = resample_draws(drawn, seed=0)[..., 0].mean(1)
    assert float(means.std()) == pytest.approx(float(torch.arange(10.0).std(correction=0)) / 10**0.5, rel=0.05)
    assert torch.equal(resample_draws(drawn[:, :1], seed=0), drawn[:, :1])


def test_p_counts_the_draws_that_do_as_well():
    result = spread([2.0, 1.0, 2.0, 3.0, 4.0], lower_is_better=True)
    assert result["p"] == pytest.approx(3 / 5)
    assert spread([9.0, 1.0, 2.0], lower_is_better=False)["p"] == pytest.approx(1 / 3)
