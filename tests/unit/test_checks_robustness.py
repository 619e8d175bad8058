"""Robustness: both models see the same spoilt images, and what they lose is paired."""

from dataclasses import replace

import pytest
import torch

from attnrx.checks import Robustness
from attnrx.data import CORRUPTIONS, Normalization
from attnrx.errors import InvalidInput, UnknownName
from comparisons import Setting


@pytest.fixture
def setting() -> Setting:
    return Setting.of("svda")


def test_every_corruption_and_severity_is_reported_and_one_over_all(setting: Setting):
    findings = Robustness()(setting.comparison(setting.compressed, images=12))
    assert len(findings) == 4 * 5 + 1
    assert len({finding.claim for finding in findings}) == 21
    told = {(f.details["corruption"], f.details["severity"]) for f in findings[:-1]}
    assert told == {(name, severity) for name in CORRUPTIONS for severity in range(1, 6)}
    mean = sum(finding.value for finding in findings[:-1]) / 20
    assert findings[-1].value == pytest.approx(mean)


def test_a_finding_is_what_the_models_answer_to_those_images(setting: Setting):
    comparison = setting.comparison(setting.compressed, images=30, batch_size=30)
    finding, _ = Robustness(("noise",), (3,))(comparison)
    (batch,) = comparison.data.batches(30)
    normalization = Normalization((0.5,), (0.5,))
    spoilt = CORRUPTIONS["noise"](normalization.invert(batch.images), 3, torch.Generator().manual_seed(0))
    images = normalization.apply(spoilt).double()
    with torch.no_grad():
        before, after = (m(images).argmax(-1) for m in (comparison.reference, comparison.candidate))
    assert finding.details["reference_accuracy"] == pytest.approx(100 * float((before == batch.labels).double().mean()))
    assert finding.details["candidate_accuracy"] == pytest.approx(100 * float((after == batch.labels).double().mean()))
    assert finding.details["agreement"]["value"] == pytest.approx(100 * float((before == after).double().mean()))
    assert finding.value == pytest.approx(finding.details["candidate_accuracy"] - finding.details["reference_accuracy"])


def test_the_images_are_spoilt_alike_in_batches_of_any_size(setting: Setting):
    check = Robustness(("noise", "contrast"), (5,))
    small, large = (check(setting.comparison(setting.compressed, 32, batch_size=size)) for size in (16, 32))
    assert [f.value for f in small] == [f.value for f in large]


def test_only_the_first_images_are_used_and_a_limit_makes_a_claim(setting: Setting):
    findings = Robustness(("blur",), (1,), images=7, most_drop=100.0)(setting.comparison(setting.compressed))
    assert {finding.n for finding in findings} == {7}
    assert findings[-1].holds is True
    assert Robustness(("blur",), (1,), most_drop=0.0)(setting.comparison(setting.compressed))[-1].holds is False


def test_data_on_another_scale_is_refused(setting: Setting):
    comparison = setting.comparison(setting.compressed)
    comparison = replace(comparison, data=comparison.data.renormalized(Normalization((0.1,), (0.1,))))
    with pytest.raises(InvalidInput, match="normalized otherwise"):
        Robustness()(comparison)


def test_unknown_corruptions_and_severities_are_refused():
    with pytest.raises(UnknownName, match="did you mean 'noise'"):
        Robustness(("nois",))
    with pytest.raises(InvalidInput, match="1 is the mildest"):
        Robustness(severities=(0, 1))
    with pytest.raises(InvalidInput, match="at least one"):
        Robustness(images=0)
