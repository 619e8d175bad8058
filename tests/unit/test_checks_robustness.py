"""Robustness: both models see the same corrupted images, and what they lose is paired."""

import pytest
import torch

from attnrx.data import Normalization
from attnrx.show.checks import Comparison
from attnrx.vit.models import attach_tokens_, family_of
from attnrx.vit.tokens import TokenPolicy, ToMe
from attnrx_lab.checks import Robustness
from attnrx_lab.corruptions import CORRUPTION_GROUPS, CORRUPTIONS
from support import cases
from support.comparisons import Setting, pixels


@pytest.fixture
def setting() -> Setting:
    return Setting.of("svda")


class Tokens:
    """A model of three colours, and the same with tokens that leave by mask and by compression."""

    def __init__(self) -> None:
        self.config = cases.ViTConfig.uniform("dense", width=12, depth=3, heads=3, **{**cases.TINY, "channels": 3})
        self.reference = cases.model(self.config)
        self.made = {by: self._reduced(by) for by in ("mask", "compress")}

    def _reduced(self, by: str) -> torch.nn.Module:
        made = cases.model(self.config)
        attach_tokens_(made, family_of(made), TokenPolicy.staged(ToMe(), 0.5, (2, 3)), by)
        return made

    def comparison(self, by: str = "compress", images: int = 24) -> Comparison:
        return Comparison(self.made[by], self.reference, pixels(self.config, images))


def test_every_corruption_and_severity_is_reported_and_their_means(setting: Setting):
    findings = Robustness()(setting.comparison(setting.compressed, images=12))
    single = [finding for finding in findings if "severity" in finding.details]
    assert len(single) == 4 * 5 and len(findings) == 20 + 5 + 1
    assert len({finding.claim for finding in findings}) == 26
    mean = sum(finding.value for finding in single) / 20
    assert findings[-1].value == pytest.approx(mean)
    third = [finding.value for finding in single if finding.details["severity"] == 3]
    result = [finding.value for finding in findings if finding.details.get("severities") == [3]]
    assert result == [pytest.approx(sum(third) / 4)]


def test_the_common_ones_have_a_mean_of_their_own():
    findings = Robustness(("all",), (3,), images=4)(Tokens().comparison())
    single = {f.details["corruption"]: f for f in findings if "severity" in f.details}
    assert tuple(single) == CORRUPTION_GROUPS["all"] and len(single) == 19
    common, every = findings[-2:]
    assert (
        common.details["corruptions"] == list(CORRUPTION_GROUPS["common"]) and len(common.details["corruptions"]) == 15
    )
    assert common.value == pytest.approx(sum(single[name].value for name in CORRUPTION_GROUPS["common"]) / 15)
    result = [single[name].details["candidate_accuracy"] for name in single]
    assert every.details["candidate_accuracy"] == pytest.approx(sum(result) / 19)


def test_a_finding_is_what_the_models_answer_to_those_images(setting: Setting):
    comparison = setting.comparison(setting.compressed, images=30, batch_size=30)
    finding, _ = Robustness(("gaussian_noise",), (3,))(comparison)
    (batch,) = comparison.data.batches(30)
    normalization = Normalization((0.5,), (0.5,))
    corrupted = CORRUPTIONS["gaussian_noise"](normalization.invert(batch.images), 3, torch.Generator().manual_seed(0))
    images = normalization.apply(corrupted).double()
    with torch.no_grad():
        before, after = (m(images).argmax(-1) for m in (comparison.reference, comparison.candidate))
    assert finding.details["reference_accuracy"] == pytest.approx(100 * float((before == batch.labels).double().mean()))
    assert finding.details["candidate_accuracy"] == pytest.approx(100 * float((after == batch.labels).double().mean()))
    assert finding.details["agreement"]["value"] == pytest.approx(100 * float((before == after).double().mean()))
    assert finding.value == pytest.approx(finding.details["candidate_accuracy"] - finding.details["reference_accuracy"])


def test_the_images_are_corrupted_alike_in_batches_of_any_size(setting: Setting):
    check = Robustness(("gaussian_noise", "shot_noise", "glass_blur", "fog", "contrast"), (5,))
    small, large = (check(setting.comparison(setting.compressed, 32, batch_size=size)) for size in (3, 32))
    assert [f.details for f in small] == [f.details for f in large]


def test_models_whose_tokens_leave_are_asked_like_all_others():
    check, tokens = Robustness(("impulse_noise", "spatter"), (1, 4)), Tokens()
    masked, compressed = (check(tokens.comparison(by)) for by in ("mask", "compress"))
    assert masked == compressed
    assert any(finding.details["agreement"]["value"] < 100 for finding in compressed if "severity" in finding.details)


def test_only_the_first_images_are_used_and_a_limit_makes_a_claim(setting: Setting):
    check = Robustness(("gaussian_blur",), (1,), images=7, most_drop=100.0)
    findings = check(setting.comparison(setting.compressed))
    assert {finding.n for finding in findings} == {7}
    assert findings[-1].outcome == "holds" and findings[0].outcome == "reported"
    check = Robustness(("gaussian_blur",), (1,), most_drop=0.0)
    assert check(setting.comparison(setting.compressed))[-1].outcome == "undecided"


def test_names_of_several_are_unfolded_and_nothing_is_asked_twice():
    check = Robustness(("fog", "extra", "spatter"), (3, 1, 3))
    assert check.corruptions == ("fog", "speckle_noise", "gaussian_blur", "spatter", "saturate")
    assert check.severities == (1, 3)
    assert check.describe()["corruptions"] == list(check.corruptions)
