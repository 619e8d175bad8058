"""A comparison becomes curves over MACs with bands, and a table; files with other fields are read all the same."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from attnrx.nouns.evidence import Estimate
from attnrx.show.reports import render
from attnrx.support.errors import CheckpointError
from attnrx_lab.comparison.page import page_content, write_page
from attnrx_lab.comparison.record import Difference, MethodComparison, MethodTrial, Unreached

ABOUT: dict[str, Any] = {
    "diagnosis": {"data": {"images": 64, "fingerprint": "pets/train:64:ab"}},
    "data": "pets/test:200:cd",
    "images": 200,
    "seed": 3,
    "methods": [{"name": "mix", "rule": "total_rank:{share}", "metric": None, "repaired": 0}, {"name": "<b>wide"}],
}


DIFFERENCE = Difference(
    "mix", "<b>wide", None, 0.7, Estimate(0.02, 0.01, 0.03), 3e-4, Estimate(-1.5, -3.0, 0.2), 0.25, 200
)


def estimate(value: float, spread: float) -> Estimate:
    return Estimate(value, value - spread, value + spread)


def trial(name: str, share: float, macs_share: float) -> MethodTrial:
    loss = 1 - share
    return MethodTrial(
        method=name,
        share=share,
        params=int(1e6 * share),
        macs=int(1e8 * macs_share),
        params_share=share,
        macs_share=macs_share,
        accuracy=estimate(80 - 30 * loss, 4.0),
        change=estimate(-30 * loss, 3.0),
        agreement=estimate(100 - 40 * loss, 2.0),
        divergence=estimate(0.01 * 50**loss, 0.002),
        n=200,
        seconds=0.5,
    )


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    trials = tuple(
        trial(name, share, factor * (1 + share) / 2)
        for name, factor in (("mix", 0.9), ("<b>wide", 0.95))
        for share in (0.75, 0.5, 0.25)
    )
    return MethodComparison(trials, estimate(80.0, 5.0), ABOUT, differences=(DIFFERENCE,)).save(
        tmp_path / "comparison.json"
    )


def changed(path: Path, **changes: Any) -> Path:
    record = json.loads(path.read_text())
    record["trials"].append({**record["trials"][0], **changes})
    path.write_text(json.dumps(record))
    return path


def points(page: str, heading: str) -> list[str]:
    """What is said of the markers of one chart, in the order in which they are drawn."""
    picture = page[page.index(f'aria-label="{heading}"') :].partition("</svg>")[0]
    return re.findall(r'class="marker style-\d"[^>]*><title>([^<]*)', picture)


def test_what_compare_saves_is_read_as_it_was_measured(saved: Path) -> None:
    found = MethodComparison.load(saved)
    assert found.methods == ("mix", "<b>wide")
    assert found.accuracy.value == 80.0
    first = found.trials[0]
    assert (first.macs_share, first.divergence.low) == (pytest.approx(0.7875), pytest.approx(0.01 * 50**0.25 - 0.002))
    assert not found.unreached and len(found.trials) == 6


def test_comparisons_of_embeddings_are_in_their_own_words(saved: Path) -> None:
    record = json.loads(saved.read_text())
    logits = render(page_content(MethodComparison.load(saved)))
    record["about"]["outputs"] = "embedding"
    saved.write_text(json.dumps(record))
    page = render(page_content(MethodComparison.load(saved)))
    words = ("top-1", "KL, nats", "KL in nats", "A KL above 0")
    assert all(word in logits for word in words) and not any(word in page for word in words)
    for word in ("1-NN of the original", "Change of 1-nearest-neighbour accuracy", "A cosine distance above 0"):
        assert word in page
    trials = MethodComparison((), estimate(80.0, 5.0), record["about"])
    assert trials.columns[2:6] == ("1-NN", "change (points)", "agreement", "cosine distance")
    assert trials.difference_columns[2:5:2] == ("cosine distance", "1-NN (points)")


def test_a_target_that_no_share_reaches_is_a_line_of_the_table(saved: Path) -> None:
    trials = MethodComparison((trial("mix", 0.5, 0.9),), estimate(80.0, 5.0), ABOUT, (Unreached("<b>wide", 0.25, 0.4),))
    page = render(page_content(MethodComparison.load(trials.save(saved))))
    assert re.search(r"&lt;b&gt;wide.*target not reached: 25.*% of the MACs; it costs at least 40", page, re.DOTALL)
    alone = MethodComparison((), estimate(80.0, 5.0), ABOUT, trials.unreached).save(saved)
    assert "target not reached" in render(page_content(MethodComparison.load(alone)))


def test_every_trial_is_a_point_and_a_line_of_the_table(saved: Path) -> None:
    page = render(page_content(MethodComparison.load(saved)))
    assert "<b>" not in page
    for heading in ("Change of top-1 accuracy", "Agreement with the original", "Divergence from the original"):
        reported = points(page, heading)
        assert [words.partition(":")[0] for words in reported[:3]] == [
            f"mix at {kept}\N{NO-BREAK SPACE}%" for kept in (25, 50, 75)
        ]
        assert len(reported) == 6
    # A band each: three lower ends lie under three upper ends.
    assert len(re.findall(r'class="band style-\d" d="M[^L]*(?:L[^L]*){5}z"', page)) == 2 * 3
    assert page.count("log10 of the KL in nats") >= 1
    assert len(re.findall(r'<th scope="row">(?:mix|&lt;b&gt;wide)</th>', page)) == 6
    assert "2 methods were compared with the original in 6 trials on 200 images" in page
    for words in ("64 images, pets/train:64:ab", "200 images, pets/test:200:cd", "rule: total_rank:{share}"):
        assert words in page


def test_differences_between_methods_have_intervals_and_corrected_p_values(saved: Path) -> None:
    record = MethodComparison.load(saved)
    (pair,) = record.differences
    assert (pair.first, pair.second, pair.target, pair.divergence_p) == ("mix", "<b>wide", 0.7, 3e-4)
    page = render(page_content(record))
    table = page[page.index("Differences between methods") :]
    assert "&lt;b&gt;wide minus mix" in table and "0.0003" in table and "0.25" in table


def test_small_differences_are_shown_on_a_linear_scale(saved: Path) -> None:
    record = json.loads(saved.read_text())
    for each in record["trials"]:
        each["divergence"] = {"value": 0.0, "low": 0.0, "high": 0.0} if each["share"] == 0.75 else each["divergence"]
    saved.write_text(json.dumps(record))
    assert "log10 of" not in render(page_content(MethodComparison.load(saved)))


def test_a_methods_of_one_trial_has_its_interval(saved: Path) -> None:
    path = changed(saved, method="alone", macs_share=0.8, unheard_of=[1, 2])
    page = render(page_content(MethodComparison.load(path)))
    assert page.count('class="whisker style-2"') == 3


def test_what_could_not_be_measured_is_not_drawn(saved: Path) -> None:
    nothing = {"value": None, "low": None, "high": None}
    path = changed(saved, method="large", macs_share=None, change=nothing)
    page = render(page_content(MethodComparison.load(path)))
    assert len(points(page, "Change of top-1 accuracy")) == 6


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"kind": "attnrx evidence"}, "is not an attnrx comparison"),
        ({"trials": []}, "holds no trial yet"),
        ({"trials": [{"share": 0.5}]}, "method is missing"),
        ({"accuracy": {"value": "much"}}, "accuracy.low is missing"),
    ],
)
def test_files_that_are_no_comparison_are_refused(saved: Path, changes: dict[str, Any], complaint: str) -> None:
    saved.write_text(json.dumps({**json.loads(saved.read_text()), **changes}))
    with pytest.raises(CheckpointError, match=complaint):
        MethodComparison.load(saved)


def test_the_page_is_written_as_a_file(saved: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert write_page(page, MethodComparison.load(saved)) == page
    assert 'id="comparison"' in page.read_text()
