"""Evidence over several runs."""

from dataclasses import replace
from pathlib import Path

import pytest

from attnrx.nouns.evidence import Evidence, Finding
from attnrx.show.checks import aggregate
from attnrx.show.checks.statistics import t_interval
from attnrx.support.errors import InvalidInput


def run(value: float, seed: int, limit: float | None = None) -> Evidence:
    outcome = "reported" if limit is None else "holds" if value >= limit else "fails"
    finding = Finding("accuracy", "change", value, "points", limit, outcome, value - 1, value + 1, n=100, seed=seed)
    return Evidence((finding,), {"seed": seed, "data": "digits"})


def test_the_mean_over_runs_with_its_t_interval():
    merged = aggregate([run(1.0, 42), run(2.0, 43), run(4.0, 44)])
    (finding,) = merged.findings
    expected = t_interval([1.0, 2.0, 4.0])
    assert (finding.value, finding.low, finding.high) == (expected.value, expected.low, expected.high)
    assert finding.n == 3
    assert finding.details["deviation"] == pytest.approx(1.5275252316519465)
    assert [entry["value"] for entry in finding.details["runs"]] == [1.0, 2.0, 4.0]
    assert dict(merged.about) == {"runs": 3, "seed": [42, 43, 44], "data": "digits"}


def test_a_claim_holds_when_it_held_in_every_run():
    assert aggregate([run(1.0, 1, limit=0.0), run(2.0, 2, limit=0.0)]).outcome == "holds"
    assert aggregate([run(1.0, 1, limit=0.0), run(-2.0, 2, limit=0.0)]).outcome == "fails"
    (finding,) = aggregate([run(1.0, 1, limit=0.0), run(2.0, 2, limit=0.5)]).findings
    assert (finding.limit, finding.outcome) == (None, "reported")  # two different claims make no common one


def test_one_run_keeps_its_own_interval():
    (finding,) = aggregate([run(1.0, 42)]).findings
    assert (finding.low, finding.high, finding.n) == (0.0, 2.0, 1)


def test_aggregated_evidence_is_evidence(tmp_path: Path):
    merged = aggregate([run(1.0, 42), run(2.0, 43)])
    assert Evidence.load(merged.save(tmp_path / "evidence.json")) == merged


def test_runs_with_different_claims_are_refused():
    other = replace(run(1.0, 42).findings[0], claim="another")
    with pytest.raises(InvalidInput, match="run 1 does not make the same claims"):
        aggregate([run(1.0, 42), Evidence((other,), {})])
    with pytest.raises(InvalidInput, match="no evidence"):
        aggregate([])
