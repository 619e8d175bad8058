"""The paper's bounds: they hold on random draws, are reached on the adversarial one and break where they must."""

import pytest
import torch

from attnrx.decide.diagnostics import effective_rank
from attnrx_lab.checks import Bounds
from attnrx_lab.checks.bounds import head_scores, proposition_1, proposition_3, proposition_4, theorem_1
from support import cases
from support.comparisons import Setting, weakest_removed

BATCH, TOKENS, HEADS, DIRECTIONS, SCALE = 3, 6, 2, 5, 5**-0.5


def rows(seed: int, length: float = 1.0) -> torch.Tensor:
    drawn = torch.randn(BATCH, TOKENS, HEADS, DIRECTIONS, generator=torch.Generator().manual_seed(seed))
    return length * drawn / drawn.norm(dim=-1, keepdim=True)


def strengths(seed: int) -> torch.Tensor:
    return 6 * torch.randn(HEADS, DIRECTIONS, generator=torch.Generator().manual_seed(seed))


def change_and_moved(query: torch.Tensor, key: torch.Tensor, strength: torch.Tensor, keep: torch.Tensor):
    before = head_scores(query, key, strength, SCALE)
    after = head_scores(query, key, strength * keep, SCALE)
    return before - after, before.softmax(-1) - after.softmax(-1)


@pytest.mark.parametrize("seed", range(8))
def test_every_bound_holds_on_random_draws(seed: int):
    query, key, strength = rows(seed), rows(seed + 100), strengths(seed)
    keep = torch.rand(HEADS, DIRECTIONS, generator=torch.Generator().manual_seed(seed)) < 0.5
    change, moved = change_and_moved(query, key, strength, keep)
    most = SCALE * (strength * ~keep).abs().amax(-1)
    perturbed = (query + 0.1 * rows(seed + 200), key + 0.1 * rows(seed + 300))
    for bounded in (
        theorem_1(change, most),
        proposition_1(change, moved),
        proposition_4((query, key), perturbed, strength, SCALE),
    ):
        assert bounded.shape == (BATCH, HEADS)
        assert bool((bounded <= 1 + 1e-9).all())
        assert bool((bounded >= 0).all())


def test_theorem_1_is_reached_by_aligned_rows_and_broken_by_long_ones():
    query = torch.zeros(1, 2, 1, 3)
    query[..., 1] = 1
    strength = torch.tensor([[1.0, -4.0, 2.0]])
    change = head_scores(query, query, torch.tensor([[0.0, -4.0, 0.0]]), SCALE)
    assert float(theorem_1(change, SCALE * strength.abs().amax(-1))) == pytest.approx(1)
    assert float(theorem_1(9 * change, SCALE * strength.abs().amax(-1))) > 1


def test_proposition_1_is_nearly_reached_at_even_odds():
    scores = torch.tensor([[[[0.0, 0.0]]]])
    change = torch.tensor([[[[0.01, -0.01]]]])
    moved = scores.softmax(-1) - (scores - change).softmax(-1)
    assert 0.999 < float(proposition_1(change, moved)) <= 1
    assert float(proposition_1(change, 1.01 * moved)) > 1


def test_proposition_3_is_reached_by_generic_rows_and_broken_by_what_was_not_removed():
    query, key, strength = rows(1), rows(2), strengths(3)
    keep = torch.tensor([[True, False, True, True, False], [False, False, True, False, False]])
    scores = head_scores(query, key, strength * keep, SCALE)
    assert torch.allclose(proposition_3(scores, keep.sum(-1)), torch.ones(BATCH, HEADS, dtype=torch.float64))
    assert bool((proposition_3(head_scores(query, key, strength, SCALE), keep.sum(-1)) > 1).all())
    assert float(proposition_3(torch.zeros(1, 1, 3, 3), torch.tensor([0]))) == 0  # nothing left, and no score


def test_proposition_4_is_reached_in_one_direction():
    query, key = torch.full((1, 1, 1, 1), 1.0), torch.full((1, 1, 1, 1), 1.0)
    strength = torch.tensor([[3.0]])
    found = proposition_4((query, key), (query + 0.5, key), strength, SCALE)
    assert float(found) == pytest.approx(1)


def test_equation_25_is_reached_at_both_ends():
    assert float(effective_rank(torch.tensor([0.0, -3.0, 0.0]))) == pytest.approx(1)
    assert float(effective_rank(torch.tensor([2.0, -2.0, 2.0]))) == pytest.approx(3)


@pytest.mark.parametrize("config", cases.CONFIGS)
@pytest.mark.parametrize("pattern", ["half", "ragged", "zero", "head-removed"])
def test_every_bound_holds_on_the_activations_of_every_model(config: str, pattern: str):
    setting = Setting.of(config, pattern)
    findings = Bounds(images=6)(setting.comparison(setting.reference, images=6))
    assert all(finding.outcome == "holds" for finding in findings)
    svda = cases.CONFIGS[config].attention[0].form == "svda"
    loses = any(not layer.qk.keep[layer.heads].all() for layer in setting.prescription.layers)
    found = {finding.details["quantity"] for finding in findings}
    assert {"Proposition 4", "Eq. 25"} <= found
    assert ("Theorem 1, Eq. 12" in found) == (svda and loses)


def test_the_bounds_of_a_threshold_are_not_vacuous():
    setting = Setting.of("svda-deep")
    setting = Setting(setting.reference, weakest_removed(setting.reference, 6))
    findings = Bounds(images=16)(setting.comparison(setting.reference, images=16))
    near = {finding.details["quantity"]: finding.value for finding in findings}
    assert near["Theorem 1, Eq. 12"] > 0.3
    assert near["Theorem 1, Eq. 13"] <= near["Theorem 1, Eq. 12"]
    assert near["Proposition 1"] > 0.1
    assert near["Proposition 4"] > 0.05
