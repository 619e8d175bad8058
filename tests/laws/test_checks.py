"""What every check keeps, whatever it measures."""

from pathlib import Path

import pytest

from attnrx.nouns.evidence import Evidence, Finding
from attnrx.show.checks import CHECKS
from attnrx.vit.models import model_fingerprint
from support import cases
from support.comparisons import Setting

CONFIGS = ("svda", "dense")


def findings_of(check: str, config: str, setting: Setting | None = None) -> tuple[Finding, ...]:
    setting = setting or Setting.of(config)
    made = cases.CHECKS[check](setting.reference, setting.prescription)
    return made(setting.comparison(setting.compressed, images=20))


def test_the_case_table_has_every_check():
    assert cases.CHECKS.keys() == CHECKS.keys()


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("check", cases.CHECKS)
def test_findings_carry_the_checks_name_and_survive_a_file(check: str, config: str, tmp_path: Path):
    findings = findings_of(check, config)
    assert findings
    assert {finding.check for finding in findings} == {check}
    assert all(finding.details["quantity"] for finding in findings)
    evidence = Evidence(findings, {"about": "a test"})
    assert Evidence.load(evidence.save(tmp_path / "evidence.json")) == evidence


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("check", [name for name in cases.CHECKS if name != "latency"])
def test_checks_are_repeatable(check: str, config: str):
    assert findings_of(check, config) == findings_of(check, config)


@pytest.mark.parametrize("check", cases.CHECKS)
def test_claims_are_distinct_so_that_runs_can_be_compared(check: str):
    evidence = Evidence(findings_of(check, "svda"), {})
    assert len({finding.claim for finding in evidence.findings}) == len(evidence.findings)


@pytest.mark.parametrize("check", cases.CHECKS)
def test_checks_change_no_model(check: str):
    setting = Setting.of("svda")
    before = model_fingerprint(setting.reference)
    backends = [layer.attention.backend for layer in setting.reference.layers]  # type: ignore[union-attr]
    setting.reference.train()
    findings_of(check, "svda", setting)
    assert setting.reference.training
    assert model_fingerprint(setting.reference) == before
    assert [layer.attention.backend for layer in setting.reference.layers] == backends  # type: ignore[union-attr]


@pytest.mark.parametrize("check", cases.CHECKS)
def test_intervals_enclose_their_value(check: str):
    for finding in findings_of(check, "svda"):
        assert (finding.low is None) == (finding.high is None)
        if finding.low is not None and finding.high is not None and "calibration error of" not in finding.claim:
            assert finding.low <= finding.value <= finding.high, finding
