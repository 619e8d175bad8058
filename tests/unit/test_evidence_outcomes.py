"""A claim holds, fails or is undecided, by its whole interval; an undecided one states the n that would decide."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import attnrx as rx
from attnrx.nouns.evidence import Evidence, Finding, against_limit
from attnrx.show.checks import Accuracy
from attnrx.show.checks.statistics import paired_change
from attnrx.show.reports import ReportContent
from attnrx.show.reports.page import model_card, render
from attnrx.support.errors import InvalidInput
from attnrx.vit.models import model_fingerprint
from support import planned


def change(lost: int, gained: int, images: int, most_drop: float = 1.0) -> Finding:
    before, after = torch.ones(images, dtype=torch.bool), torch.ones(images, dtype=torch.bool)
    after[:lost] = False
    before[lost : lost + gained] = False
    return Accuracy().change_of_accuracy("", paired_change(before, after, 0), most_drop, images)


@pytest.mark.parametrize(
    ("value", "interval", "at_least", "strict", "outcome"),
    [
        (0.5, (0.1, 0.9), True, False, "holds"),
        (-0.5, (-0.9, -0.1), True, False, "fails"),
        (0.5, (-0.1, 1.1), True, False, "undecided"),
        (-0.5, (-1.1, 0.1), True, False, "undecided"),
        (0.5, (0.1, 0.9), False, False, "fails"),
        (-0.5, (-0.9, -0.1), False, False, "holds"),
        (0.5, (-0.1, 1.1), False, False, "undecided"),
        (0.0, (None, None), True, False, "holds"),
        (0.0, (0.0, 0.0), True, True, "fails"),
        (0.1, (None, None), False, False, "fails"),
        (math.nan, (math.nan, math.nan), False, False, "fails"),
    ],
)
def test_the_whole_interval_decides(
    value: float, interval: tuple[float | None, float | None], at_least: bool, strict: bool, outcome: str
) -> None:
    assert against_limit(value, 0.0, interval, 50, at_least=at_least, strict=strict)["outcome"] == outcome


def test_a_gain_never_fails_a_limit_on_losses() -> None:
    gain = change(lost=14, gained=18, images=200)  # +2 points on few images
    assert gain.value == pytest.approx(2.0) and gain.low is not None and gain.low < -1
    assert gain.outcome == "undecided"
    assert change(lost=40, gained=4, images=200).outcome == "fails"
    assert change(lost=1, gained=1, images=4000).outcome == "holds"


@pytest.mark.parametrize(("lost", "gained"), [(16, 16), (16, 11)])
def test_so_many_images_as_are_named_decide(lost: int, gained: int) -> None:
    few = change(lost, gained, 200)
    assert few.outcome == "undecided" and few.deciding_n is not None and few.deciding_n > 200
    factor = math.ceil(1.1 * few.deciding_n / 200)
    assert change(factor * lost, factor * gained, factor * 200).outcome in ("holds", "fails")
    half = few.deciding_n // 2 // 200
    if half > 1:
        assert change(half * lost, half * gained, half * 200).outcome == "undecided"


def test_limits_and_outcomes_go_together() -> None:
    wrong: tuple[dict[str, Any], ...] = ({"limit": 1.0}, {"outcome": "holds"}, {"limit": 1.0, "outcome": "maybe"})
    for fields in wrong:
        with pytest.raises(InvalidInput, match="the outcome"):
            Finding("accuracy", "change", 0.0, **fields)


def test_evidence_counts_the_three_outcomes_and_every_page_shows_them(tmp_path: Path) -> None:
    findings = (change(1, 1, 4000), change(16, 16, 200), Finding("costs", "saved", 12.0, "%"))
    evidence = Evidence(findings, {})
    assert evidence.outcome == "undecided" and evidence.summary.startswith("of 2 claims 1 holds, 1 is undecided;")
    assert Evidence((*findings, change(40, 4, 200)), {}).outcome == "fails"
    assert Evidence(findings[:1], {}).outcome == "holds" and Evidence(findings[2:], {}).outcome == "reported"
    assert Evidence.load(evidence.save(tmp_path / "evidence.json")) == evidence
    page = render(ReportContent("undecided", evidence=evidence))
    assert "Of 2 claims 1 holds, 1 is undecided" in page and "would decide" in page
    assert "would decide" in model_card({}, evidence)


def test_evidence_that_could_not_be_read_again_is_not_saved_with_a_model(tmp_path: Path) -> None:
    original = planned.original()
    about = {"candidate": model_fingerprint(original)}
    edited = Finding("fidelity", "a claim", 0.9, limit=0.4, outcome="fails", low=0.3, high=0.6)
    evidence = Evidence((edited,), about)
    with pytest.raises(InvalidInput, match=r"evidence\.json could not be read again and was not saved"):
        rx.save(original, tmp_path / "model", evidence=evidence)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("value", "ends", "n", "words"),
    [
        (
            0.5,
            (-0.1, 1.1),
            200,
            "the limit 0 points lies in the interval [-0.1, 1.1]; about 290 images would decide, and",
        ),
        (1e-6, (-0.1, 0.1), 200, "more images hardly help, because the value is almost at the limit"),
        (0.0, (None, None), 1, "1 images are too few to judge the limit 0 points"),
    ],
)
def test_an_undecided_claim_says_its_limit_why_and_what_would_decide(
    value: float, ends: tuple[float | None, float | None], n: int, words: str
) -> None:
    judged = against_limit(value, 0.0, ends, n, at_least=True)
    claim = Finding("accuracy", "change", value, "points", **{**judged, "outcome": "undecided"})
    assert claim.outcome_text.startswith("undecided: ") and words in claim.outcome_text


def test_a_value_that_differs_from_its_limit_by_rounding_is_decided_by_no_number_of_samples() -> None:
    limit = 1.0 + 2e-9
    found = Finding("check", "a claim", 1.0, **against_limit(1.0, limit, (0.0, 2.0), 200, at_least=False))
    assert found.outcome == "holds" or found.deciding_n is None
    found = Finding("check", "a claim", 1.0, **against_limit(1.0, limit, (0.0, 2.0), 200, at_least=True))
    assert (found.outcome, found.deciding_n) == ("undecided", None) and "would decide" not in found.outcome_text
