"""Contenders as text, and what is measured of them."""

from pathlib import Path

import pytest

import cases
from attnrx.errors import InvalidInput, UnknownName
from attnrx.examination import diagnose
from attnrx.experiments import Bench, Contender, compare_contenders
from attnrx.models import family_of
from attnrx.storage import read_json
from comparisons import pixels

DENSE = cases.CONFIGS["dense"]


@pytest.mark.parametrize(
    ("text", "contender"),
    [
        ("mix=total_rank:{share}", Contender("mix", "total_rank:{share}")),
        ("two words=energy_retention:0.9@mix", Contender("two words", "energy_retention:0.9", "mix")),
        ("vo=values=total_rank:{share}", Contender("vo", values="total_rank:{share}")),
        (
            "all=top_rank:3@mix+values=top_rank:2+mlp=top_rank:5+refine=20",
            Contender("all", "top_rank:3", "mix", "top_rank:2", "top_rank:5", 20),
        ),
    ],
)
def test_contenders_are_read(text: str, contender: Contender) -> None:
    assert Contender.parse(text) == contender


@pytest.mark.parametrize("text", ["", "mix", "=top_rank:3", "mix=", "mix=top_rank:3+top_rank:2", "mix=a+refine=many"])
def test_what_is_no_contender_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        Contender.parse(text)


def bench() -> Bench:
    model, images = cases.model(DENSE), pixels(DENSE, 24)
    return Bench(model, diagnose(model, images, batch_size=8), images, images, batch_size=8)


def test_keeping_more_loses_less_and_costs_more(tmp_path: Path) -> None:
    own = bench()
    contenders = [Contender("mix", "total_rank:{share}"), Contender("fixed", "uniform_rank:1")]
    trials = compare_contenders(own, contenders, (0.75, 0.25))
    most, least, fixed = trials.trials
    assert (most.share, least.share, fixed.share) == (0.75, 0.25, 1.0)  # what does not vary is measured once
    assert most.divergence.value < least.divergence.value
    assert most.macs_share > least.macs_share > 0
    before = family_of(own.model).costs(own.model)
    assert most.params == round(most.params_share * before.params)
    assert most.change.low <= most.change.value <= most.change.high
    record = read_json(trials.save(tmp_path / "comparison.json"))
    assert [trial["contender"] for trial in record["trials"]] == ["mix", "mix", "fixed"]
    assert trials.to_markdown().count("\n") == 4


def test_keeping_everything_is_refused_and_wrong_shares_are() -> None:
    own = bench()
    with pytest.raises(InvalidInput, match="shares in"):
        compare_contenders(own, [Contender("mix", "total_rank:{share}")], (1.5,))
    with pytest.raises(UnknownName, match="rule"):
        compare_contenders(own, [Contender("mix", "totl_rank:{share}")], (0.5,))
