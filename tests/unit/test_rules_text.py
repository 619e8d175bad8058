"""Rules as text and as dictionaries: every rule survives both, and mistakes are named."""

import pytest

from attnrx.decide.rules import RULES, And, ByLayer, EnergyRetention, Or, Rule, TotalRank, UniformRank, parse_rule
from attnrx.support.errors import InvalidRule, UnknownName
from attnrx_lab.rules import (
    DivergenceRank,
    EffectiveRank,
    FusionOwner,
    LargestMatched,
    RandomMatched,
    RemoveHeads,
    SharedRank,
    Shrinkage,
    Threshold,
    TopRank,
)
from support.cases import REWRITING
from support.cases import RULES as OWN

EXAMPLES = {
    **OWN,
    **REWRITING,
    "remove_heads": RemoveHeads(spectral=0.9),
    "fusion_owner": FusionOwner(),
    "divergence_rank": DivergenceRank(0.5, scope="model"),
    "by_layer": ByLayer((EnergyRetention(0.8), TopRank(2) | Shrinkage(0.5))),
    "by_layer-matched": RandomMatched(ByLayer((TopRank(2), TopRank(3))), seed=3),
    "by_layer-one": ByLayer((TopRank(2),)),
}


@pytest.mark.parametrize("rule", EXAMPLES.values(), ids=EXAMPLES)
def test_text_round_trip(rule: Rule) -> None:
    assert parse_rule(str(rule)) == rule
    assert str(parse_rule(str(rule))) == str(rule)


def test_every_registered_rule_is_a_case() -> None:
    assert {type(rule) for rule in EXAMPLES.values()} >= set(RULES.values())


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("energy_retention:0.90", EnergyRetention(0.9)),
        ("  energy_retention : rho = 9e-1 ", EnergyRetention(0.9)),
        ("effective_rank", EffectiveRank()),
        ("remove_heads:0.9,output=0.8", RemoveHeads(0.9, 0.8)),
        ("threshold:0.1 & remove_heads", Threshold(0.1) & RemoveHeads()),
        ("random_matched(energy_retention:0.9):seed=3", RandomMatched(EnergyRetention(0.9), seed=3)),
        ("largest_matched(top_rank:1 | shrinkage:0.5)", LargestMatched(TopRank(1) | Shrinkage(0.5))),
        ("threshold:1|top_rank:2&top_rank:3", Or((Threshold(1.0), And((TopRank(2), TopRank(3)))))),
        ("(threshold:1|top_rank:2)&top_rank:3", And((Or((Threshold(1.0), TopRank(2))), TopRank(3)))),
        ("total_rank:0.5,scope=model,multiple=4", TotalRank(0.5, scope="model", multiple=4)),
        ("total_rank(0.5, scope=model, multiple=4)", TotalRank(0.5, scope="model", multiple=4)),
        ("random_matched(top_rank(2), seed=3)", RandomMatched(TopRank(2), seed=3)),
        ("uniform_rank:1", UniformRank(1)),
        ("uniform_rank:1.0,metric=mix", UniformRank(1.0, metric="mix")),
        ("shared_rank:96,form=cp", SharedRank(96, form="cp")),
    ],
)
def test_reading(text: str, rule: Rule) -> None:
    assert parse_rule(text) == rule


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (EnergyRetention(0.9), "energy_retention:0.9"),
        (Threshold(1e-12), "threshold:1e-12"),
        (RemoveHeads(), "remove_heads"),
        (RemoveHeads(output=0.8), "remove_heads:output=0.8"),
        (RandomMatched(TopRank(2)), "random_matched(top_rank:2)"),
        (RandomMatched(TopRank(2), seed=7), "random_matched(top_rank:2):seed=7"),
        (TopRank(1) & (TopRank(2) | EffectiveRank()), "top_rank:1 & (top_rank:2 | effective_rank)"),
    ],
)
def test_writing(rule: Rule, text: str) -> None:
    assert str(rule) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "character 1: expected the name of a rule, found 'the end'"),
        ("energy_retention", r"energy_retention needs rho, as in energy_retention\(rho=...\)"),
        ("energy_retention:high", "rho of energy_retention is a number, not high"),
        ("energy_retention:0.9,0.8", "has only the knobs rho, metric, found '0.8'"),
        ("energy_retention:0.9,rho=0.8", "rho is given twice"),
        ("energy_retention:0.9 top_rank:3", "character 22: expected '&', '|' or the end, found 'top_rank'"),
        ("energy_retention:90%%", "character 21: '%' cannot be read"),
        ("top_rank:2.5", "rank of top_rank is a whole number, not 2.5"),
        ("(top_rank:2", r"expected '\)', found 'the end'"),
        ("random_matched", "random_matched needs rule, as in random_matched"),
        ("random_matched(top_rank:2; top_rank:3)", r"expected '\)', found ';'"),
        ("(" * 5000, "may have 50 brackets, found 5000"),
        ("energy_retention:1.5", "rho=1.5.*a share above 0, at most 1"),
    ],
)
def test_mistakes_are_named(text: str, message: str) -> None:
    with pytest.raises(InvalidRule, match=message):
        parse_rule(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("energy_retension:0.9", "unknown rule 'energy_retension': did you mean 'energy_retention'"),
        ("energy_retention:roh=0.9", "unknown knob of energy_retention 'roh': did you mean 'rho'"),
    ],
)
def test_unknown_names_list_the_nearest(text: str, message: str) -> None:
    with pytest.raises(UnknownName, match=message):
        parse_rule(text)
