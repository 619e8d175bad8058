"""A knob turned up takes back nothing that was kept; controls match; rules combine like sets; heads have no order."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from attnrx.decide.rules import EnergyRetention, Rule, score_bound
from attnrx.nouns.prescription import ScoreDecision
from attnrx_lab.rules import (
    ContributionEnergy,
    LargestMatched,
    NormClip,
    RandomMatched,
    Shrinkage,
    Threshold,
    TopRank,
    UniformHeads,
    UniformMatched,
)
from support.cases import RULES
from support.diagnoses import diagnosis, permuted

RAGGED = [False, True]

# name -> the rule at a knob setting, and settings from keeping little to keeping much
KNOBS: dict[str, tuple[Callable[[float], Rule], list[float]]] = {
    "threshold": (Threshold, [3.0, 1.0, 0.5, 0.1, 0.01]),
    "energy_retention": (EnergyRetention, [0.01, 0.3, 0.6, 0.9, 0.99, 1.0]),
    "top_rank": (lambda rank: TopRank(int(rank)), [0, 1, 3, 6, 8]),
    "contribution_energy": (ContributionEnergy, [0.01, 0.3, 0.6, 0.9, 0.99, 1.0]),
    "shrinkage": (Shrinkage, [3.0, 1.0, 0.5, 0.1, 0.01]),
    "norm_clip": (NormClip, [0.01, 0.1, 0.5, 1.0, 3.0]),
    "uniform_heads": (UniformHeads, [0.9, 0.3, 0.1, 1e-3, 1e-9]),
}


def same(a: ScoreDecision, b: ScoreDecision) -> bool:
    return torch.equal(a.keep, b.keep) and torch.equal(a.strength, b.strength)


def within(less: ScoreDecision, more: ScoreDecision) -> bool:
    """Whether everything that `less` keeps `more` keeps too, at least as strong."""
    kept = not (less.keep & ~more.keep).any()
    return kept and bool((less.strength.abs() <= more.strength.abs()).all())


@pytest.mark.parametrize("ragged", RAGGED)
@pytest.mark.parametrize("name", KNOBS)
def test_more_kept_contains_less_kept_and_promises_more(name: str, ragged: bool) -> None:
    make, settings = KNOBS[name]
    found = diagnosis(ragged=ragged)
    for layer, whole in enumerate(found.layers):
        decisions = [make(setting).decide(found, layer) for setting in settings]
        for less, more in pairwise(decisions):
            assert within(less, more)
            assert bool((score_bound(whole.spectrum, more) <= score_bound(whole.spectrum, less)).all())
        assert not same(decisions[0], decisions[-1])  # the knob does something


@pytest.mark.parametrize("ragged", RAGGED)
@pytest.mark.parametrize("name", RULES)
def test_every_decision_is_sound(name: str, ragged: bool) -> None:
    found = diagnosis(ragged=ragged)
    for layer, whole in enumerate(found.layers):
        before, decision = whole.spectrum, RULES[name].decide(found, layer)
        assert not (decision.keep & ~before.used).any()  # padding never stays
        assert bool((decision.strength[~decision.keep] == 0).all())
        assert bool((decision.strength.abs() <= before.strength.abs()).all())  # nothing grows
        assert bool((decision.strength * before.strength >= 0).all())  # no sign turns
        assert all(decision.reasons)


@pytest.mark.parametrize("order", [[1, 0, 2, 3], [3, 2, 1, 0], [2, 3, 0, 1]])
@pytest.mark.parametrize("name", RULES)
def test_permuting_heads_permutes_the_decision(name: str, order: list[int]) -> None:
    found = diagnosis()
    moved = permuted(found, order)
    for layer in range(len(found.layers)):
        before, after = RULES[name].decide(found, layer), RULES[name].decide(moved, layer)
        assert torch.equal(after.keep, before.keep[order])
        assert torch.equal(after.strength, before.strength[order])
        assert after.reasons == tuple(before.reasons[head] for head in order)


@pytest.mark.parametrize("ragged", RAGGED)
@pytest.mark.parametrize("name", RULES)
def test_controls_match_the_rank_of_every_head(name: str, ragged: bool) -> None:
    rule, found = RULES[name], diagnosis(ragged=ragged)
    for layer in range(len(found.layers)):
        wanted = rule.decide(found, layer)
        for control in (RandomMatched(rule, seed=5), LargestMatched(rule)):
            got = control.decide(found, layer)
            assert got.ranks == wanted.ranks
        even = UniformMatched(rule).decide(found, layer)
        assert sum(even.ranks) == sum(wanted.ranks)


def scores_of(strength: torch.Tensor, query: torch.Tensor, key: torch.Tensor, scale: float) -> torch.Tensor:
    return scale * torch.einsum("hir,hr,hjr->hij", query, strength, key)


@pytest.mark.parametrize("name", RULES)
def test_the_score_bound_holds_and_is_reached(name: str) -> None:
    """Theorem 1, Eq. 12: for any unit rows; and the bound is the smallest such number."""
    found, generator = diagnosis(), torch.Generator().manual_seed(1)
    before, decision = found.layers[0].spectrum, RULES[name].decide(found, 0)
    query, key = torch.nn.functional.normalize(torch.randn(2, 4, 50, 8, generator=generator), dim=-1)
    moved = scores_of(before.strength - decision.strength, query, key, before.scale).abs()
    bound = score_bound(before, decision)
    assert bool((moved.amax((1, 2)) <= bound * (1 + 1e-12)).all())
    axes = torch.eye(8).expand(4, 8, 8)  # rows along one direction are the worst case
    worst = scores_of(before.strength - decision.strength, axes, axes, before.scale).abs().amax((1, 2))
    torch.testing.assert_close(worst, bound, rtol=1e-12, atol=0)


@pytest.mark.parametrize("seed", range(4))
def test_rules_keep_the_promises_of_their_docstrings(seed: int) -> None:
    found = diagnosis(layers=1, seed=seed)
    spectrum = found.layers[0].spectrum
    norm = spectrum.strength.norm(dim=-1)

    def bound(rule: Rule) -> torch.Tensor:
        return score_bound(spectrum, rule.decide(found, 0)) / spectrum.scale

    for knob in (0.1, 0.5, 0.9):
        assert bool((bound(Threshold(knob)) < knob).all())  # Eq. 13
        assert bool((bound(Shrinkage(knob)) <= knob * (1 + 1e-12)).all())
        assert bool((bound(EnergyRetention(knob)) <= (1 - knob) ** 0.5 * norm * (1 + 1e-9)).all())
        assert bool((NormClip(knob).decide(found, 0).strength.abs() <= knob).all())  # Proposition 4
        top, same_size = TopRank(int(8 * knob)), RandomMatched(TopRank(int(8 * knob)), seed)
        assert bool((bound(top) <= bound(same_size)).all())
