"""Accuracy, fidelity and calibration: what is said of the logits of candidate, reference and masked model."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from attnrx.nouns.evidence import Finding
from attnrx.show.checks import Accuracy, Calibration, Features, Fidelity
from attnrx_lab.vision_transformer import VisionTransformer
from support.comparisons import Setting


@pytest.fixture
def setting() -> Setting:
    return Setting.of("svda")


def only(findings: tuple[Finding, ...], quantity: str, **details: object) -> Finding:
    wanted = {"quantity": quantity, **details}
    (found,) = [f for f in findings if wanted.items() <= f.details.items()]
    return found


def poorer(model: VisionTransformer) -> VisionTransformer:
    """A copy that leans towards the first class."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        model.classifier.bias[0] += 0.5
    return model


class Counting(nn.Module):
    """Counts the images that pass."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model, self.seen = model, 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.seen += len(images)
        return self.model(images)


def test_every_model_answers_every_image_once(setting: Setting):
    masked = Counting(setting.masked)
    comparison = replace(
        setting.comparison(Counting(setting.compressed)), reference=Counting(setting.reference), masked=masked
    )
    for check in (Accuracy(), Fidelity(), Calibration(), Fidelity()):
        check(comparison)
    assert comparison.candidate.seen == comparison.reference.seen == masked.seen == 40


def test_answers_are_the_models_own_and_its_mode_is_put_back(setting: Setting):
    comparison = setting.comparison(setting.compressed)
    comparison.candidate.train()
    comparison.candidate.get_submodule("layers.0").eval()
    predictions = comparison.predictions
    assert comparison.candidate.training
    assert not comparison.candidate.get_submodule("layers.0").training
    assert not comparison.reference.training
    (batch,) = comparison.data.batches(40)
    with torch.no_grad():
        expected = comparison.candidate.eval()(batch.images.double())
    assert torch.allclose(predictions.outputs["candidate"], expected, atol=1e-12)
    assert torch.equal(predictions.labels, batch.labels)


def test_accuracy_is_counted_in_pairs(setting: Setting):
    comparison = setting.comparison(poorer(setting.reference))
    findings = Accuracy()(comparison)
    right = {role: comparison.predictions.correct(role).tolist() for role in ("reference", "candidate")}
    lost = sum(a and not b for a, b in zip(right["reference"], right["candidate"], strict=True))
    gained = sum(b and not a for a, b in zip(right["reference"], right["candidate"], strict=True))
    change = only(findings, "accuracy change")
    assert (change.details["lost"], change.details["gained"]) == (lost, gained)
    assert lost + gained > 0
    assert change.value == pytest.approx(100 * (gained - lost) / 40)
    assert only(findings, "accuracy", model="reference").value == pytest.approx(100 * sum(right["reference"]) / 40)
    assert change.low is not None and change.high is not None and change.low < change.value < change.high


def test_little_loss_is_only_claimed_when_the_interval_shows_it(setting: Setting):
    few, many = (only(Accuracy()(setting.comparison(setting.reference, n, 500)), "accuracy change") for n in (10, 1000))
    assert (few.value, many.value) == (0, 0)
    assert few.outcome == "undecided"
    assert many.outcome == "holds"
    assert (
        only(Accuracy(most_drop=None)(setting.comparison(setting.reference)), "accuracy change").outcome == "reported"
    )


def test_one_image_decides_no_claim(setting: Setting):
    """Whose resamples are all equal: an interval without width would pass for an exact value."""
    checks = (Fidelity(most_discrepancy=1e6), Features(most_error=1e6), Calibration(most_rise=100.0))
    for check in checks:
        (claim,) = [finding for finding in check(setting.comparison(setting.compressed, images=1)) if finding.is_claim]
        assert (claim.outcome, claim.low, claim.high, claim.n) == ("undecided", None, None, 1)
        (claim,) = [finding for finding in check(setting.comparison(setting.compressed, images=4)) if finding.is_claim]
        assert claim.outcome == "holds" and claim.low is not None


def test_discrepancy_and_agreement_are_equations_46_and_47(setting: Setting):
    comparison = replace(setting.comparison(setting.compressed, images=40, batch_size=16), masked=setting.masked)
    findings = Fidelity()(comparison)
    logits = comparison.predictions.outputs
    masked, compressed = logits["masked"], logits["candidate"]
    found = only(findings, "discrepancy", base="masked", other="candidate")
    whole = math.sqrt(sum(float(((a - b) ** 2).sum()) for a, b in zip(masked, compressed, strict=True)))
    assert found.value == pytest.approx(whole / math.sqrt(float((masked**2).sum())))
    agreeing = sum(int(a.argmax() == b.argmax()) for a, b in zip(masked, compressed, strict=True))
    assert only(findings, "agreement", base="masked", other="candidate").value == pytest.approx(100 * agreeing / 40)
    expected = nn.functional.kl_div(
        compressed.log_softmax(-1), masked.log_softmax(-1), log_target=True, reduction="sum"
    )
    assert only(findings, "divergence", base="masked", other="candidate").value == pytest.approx(float(expected) / 40)


def test_the_pairs_are_named_and_not_repeated(setting: Setting):
    masked = setting.masked
    findings = Fidelity()(replace(setting.comparison(setting.compressed), masked=masked))
    pairs = {(f.details["base"], f.details["other"]) for f in findings}
    assert pairs == {("reference", "candidate"), ("reference", "masked"), ("masked", "candidate")}
    of_itself = Fidelity()(replace(setting.comparison(masked), masked=masked))
    assert {(f.details["base"], f.details["other"]) for f in of_itself} == {("reference", "candidate")}
    assert len({f.claim for f in findings}) == 9


def test_limits_make_claims_that_can_fail(setting: Setting):
    comparison = setting.comparison(setting.compressed)
    strict = Fidelity(most_discrepancy=1e-9, least_agreement=100.0)(comparison)
    loose = Fidelity(most_discrepancy=1e9, least_agreement=0.0)(comparison)
    assert [f.outcome for f in strict if f.is_claim] == ["fails"] * 2
    assert [f.outcome for f in loose if f.is_claim] == ["holds"] * 2


def test_calibration_of_a_sharpened_model_is_worse(setting: Setting):
    sharp = copy.deepcopy(setting.reference)
    with torch.no_grad():
        sharp.classifier.weight.mul_(50)
    findings = Calibration(most_rise=1.0)(setting.comparison(sharp, images=200))
    change = only(findings, "change of calibration error")
    own = [only(findings, f"expected calibration error of the {role}").value for role in ("reference", "candidate")]
    assert change.value == pytest.approx(own[1] - own[0])
    assert change.low is not None and change.low > 0
    assert change.outcome == "fails"
