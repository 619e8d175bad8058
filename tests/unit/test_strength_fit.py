"""Least-squares strengths in the metric of the softmax: never worse than the start, and nearer in KL divergence."""

import pytest
import torch

from attnrx_lab.strength_refit import StrengthFit

HEADS, TERMS, TOKENS = 2, 6, 9


def rows(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(4, TOKENS, HEADS, TERMS, generator=generator) for _ in range(2))  # type: ignore[return-value]


def scores(left: torch.Tensor, right: torch.Tensor, strength: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bihr,hr,bjhr->bhij", left, strength, right)


def observed(spread: float = 1.0) -> tuple[StrengthFit, torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    (left, right), fit = rows(0), StrengthFit(HEADS, TERMS)
    strength = torch.linspace(0.2, 2.0, TERMS).expand(HEADS, TERMS) * spread
    target = scores(left, right, strength)
    fit.observe(left, right, target, 1.0)
    return fit, strength, (left, right, target)


def divergence(target: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    old, new = target.log_softmax(-1), found.log_softmax(-1)
    return (old.exp() * (old - new)).sum(-1).mean((0, 2))


def test_all_terms_give_the_scores_back():
    fit, strength, _ = observed()
    everything = torch.ones(HEADS, TERMS, dtype=torch.bool)
    found = fit.solve(everything, torch.ones(HEADS, TERMS))
    torch.testing.assert_close(found, strength.double(), rtol=1e-9, atol=1e-9)
    assert fit.relative_error(found).max() < 1e-6


@pytest.mark.parametrize("spread", [0.3, 1.0, 3.0])
def test_error_is_the_variance_of_the_score_error_under_the_attention(spread: float):
    fit, strength, (left, right, target) = observed(spread)
    attention = target.softmax(-1)

    def total(found: torch.Tensor) -> torch.Tensor:
        error = scores(left, right, found) - target
        return (attention * (error - (attention * error).sum(-1, keepdim=True)).square()).sum((0, 2, 3))

    found = strength * 0.7
    expected = (total(found) / total(torch.zeros_like(found))).sqrt()
    torch.testing.assert_close(fit.relative_error(found), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("spread", [0.3, 1.0, 3.0])
def test_kept_terms_are_never_worse_than_the_start(spread: float):
    fit, strength, _ = observed(spread)
    for kept in range(1, TERMS + 1):
        keep = torch.arange(TERMS).expand(HEADS, TERMS) >= TERMS - kept
        found = fit.solve(keep, strength)
        assert not found[~keep].any()
        before = fit.relative_error(torch.where(keep, strength, 0).double())
        assert bool((fit.relative_error(found) <= before * (1 + 1e-12)).all())


def test_an_error_at_a_key_without_attention_does_not_count():
    """One query, three keys, of which the last has no attention: its score is left wrong, and the others are exact."""
    left = torch.ones(1, 1, 1, 1)
    right = torch.tensor([0.0, 1.0, 1.0]).reshape(1, 3, 1, 1)
    target = torch.tensor([0.0, 2.0, -60.0]).reshape(1, 1, 1, 3)
    fit = StrengthFit(1, 1)
    fit.observe(left, right, target, 1.0)
    found = fit.solve(torch.ones(1, 1, dtype=torch.bool), torch.ones(1, 1))
    assert found.item() == pytest.approx(2.0, rel=1e-6)


def test_small_changes_come_nearer_in_kl_divergence():
    fit, strength, (left, right, target) = observed(0.3)
    keep = torch.arange(TERMS).expand(HEADS, TERMS) > 0  # without the weakest term
    start = torch.where(keep, strength, 0)
    found = fit.solve(keep, strength).to(start.dtype)
    before, after = (divergence(target, scores(left, right, each)) for each in (start, found))
    assert bool((after < before).all())
