"""Diagnostics: bounds and where they are reached, padding, heads without energy, streaming, permuted heads."""

from dataclasses import replace

import torch

from attnrx.decide.diagnostics import (
    CentredMoment,
    Panel,
    effective_rank,
    energy,
    entropy,
    selectivity,
    suited_diagnostics,
)
from attnrx.vit.attention import Observation
from attnrx.vit.spec import Spectrum
from attnrx_lab.perturbation import noise_like
from attnrx_lab.redundancy import output_similarity, sensitivity, sparsity, spectral_redundancy

HEADS, DIRECTIONS, TOKENS, HEAD_DIM, WIDTH = 3, 4, 5, 2, 6


def spectrum(strength: torch.Tensor) -> Spectrum:
    table = torch.randn(*strength.shape, WIDTH + 1)
    heads = tuple(range(len(strength)))
    return Spectrum(table, table, strength, torch.ones_like(strength, dtype=torch.bool), 0.5, "kept", heads)


def observation(images: int, strength: torch.Tensor) -> Observation:
    query, key = torch.nn.functional.normalize(torch.randn(2, images, TOKENS, HEADS, DIRECTIONS) + 0.3, dim=-1)
    scores = 5 * torch.einsum("bihr,hr,bjhr->bhij", query, strength, key)
    attention = scores.softmax(-1)
    value = torch.randn(images, HEADS, TOKENS, HEAD_DIM)
    readout = torch.randn(HEADS, HEAD_DIM, WIDTH, generator=torch.Generator().manual_seed(0))
    return Observation(query, key, strength, 0.5, scores, attention, value, attention @ value, readout)


def part(whole: Observation, images: slice) -> Observation:
    names = ("query", "key", "scores", "attention", "value", "output")
    return replace(whole, **{name: getattr(whole, name)[images] for name in names})


def permuted(whole: Observation, order: list[int]) -> Observation:
    rows = {name: getattr(whole, name)[:, :, order] for name in ("query", "key")}
    maps = {name: getattr(whole, name)[:, order] for name in ("scores", "attention", "value", "output")}
    assert whole.strength is not None
    return replace(whole, **rows, **maps, strength=whole.strength[order], readout=whole.readout[order])


def test_effective_rank_reaches_both_bounds_and_leaves_neither() -> None:
    strength = torch.randn(200, 7) * torch.logspace(-30, 30, 200)[:, None]
    assert (effective_rank(strength) >= 1).all() and (effective_rank(strength) <= 7).all()
    for directions in range(1, 70):
        assert effective_rank(torch.full((directions,), 0.3)) <= directions
        torch.testing.assert_close(effective_rank(torch.full((directions,), 0.3)), torch.tensor(float(directions)))
    assert effective_rank(torch.tensor([0.0, -2.0, 0.0])) == 1


def test_a_head_without_energy_is_inactive_and_has_finite_gradients() -> None:
    for directions in (0, 4):
        strength = torch.zeros(2, directions, requires_grad=True)
        found = [entropy(strength), effective_rank(strength), 1 - sparsity(strength), sensitivity(strength, 0.5)]
        assert all(torch.equal(reading, torch.zeros(2)) for reading in found)
        assert energy(strength).sum() == 0
        effective_rank(strength).sum().backward()
        assert strength.grad is not None and torch.equal(strength.grad, torch.zeros(2, directions))


def test_gradient_of_effective_rank_is_right_and_finite_at_zero() -> None:
    strength = torch.tensor([0.5, -1.5, 2.0], requires_grad=True)
    assert torch.autograd.gradcheck(effective_rank, (strength,))
    partly = torch.tensor([0.5, 0.0, 2.0], requires_grad=True)
    effective_rank(partly).backward()
    assert partly.grad is not None and torch.isfinite(partly.grad).all() and partly.grad[1] == 0


def test_padding_counts_nowhere() -> None:
    strength = torch.randn(3, 4)
    padded = torch.cat([strength, torch.full((3, 2), 9.0)], dim=1)
    used = torch.arange(6).expand(3, 6) < 4
    for reading in (entropy, effective_rank, spectral_redundancy):
        torch.testing.assert_close(reading(padded, used), reading(strength))
    torch.testing.assert_close(sparsity(padded, used), sparsity(strength))
    torch.testing.assert_close(sensitivity(padded, 0.5, used), sensitivity(strength, 0.5))
    torch.testing.assert_close(energy(padded, used)[:, :4], energy(strength))


def test_selectivity_bounds() -> None:
    one_hot = torch.eye(6)[torch.randint(6, (2, 3, 6))]
    assert torch.equal(selectivity(one_hot), torch.ones(3))
    torch.testing.assert_close(selectivity(torch.full((2, 3, 6, 6), 1 / 6)), torch.zeros(3))
    assert torch.equal(selectivity(torch.ones(2, 3, 1, 1)), torch.zeros(3))
    between = selectivity(torch.randn(2, 3, 6, 6).softmax(-1))
    assert (between > 0).all() and (between < 1).all()


def test_a_duplicated_head_is_found_whatever_the_sign_of_its_strengths() -> None:
    strength = torch.randn(HEADS, DIRECTIONS)
    seen = permuted(observation(4, strength), [0, 1, 0])
    panel = Panel(suited_diagnostics(()), (spectrum(torch.stack([strength[0], strength[1], -strength[0]])),))
    panel.observe(0, seen)
    for name in ("spectral_redundancy", "output_similarity"):
        matrix = panel.readings()[0][name]
        torch.testing.assert_close(matrix[0, 2], torch.tensor(1.0))
        torch.testing.assert_close(matrix.diagonal(), torch.ones(HEADS))
        assert torch.equal(matrix, matrix.T) or torch.allclose(matrix, matrix.T, rtol=0, atol=1e-15)
        assert matrix[0, 1] < 0.999


def test_the_opposite_head_has_similarity_minus_one_and_a_constant_one_zero() -> None:
    readout = torch.randn(1, 2, 6).expand(3, 2, 6)
    output = torch.randn(20, 2)
    moment = CentredMoment()
    moment.add(torch.cat([output, -output, torch.ones(20, 2)], dim=1))
    expected = torch.tensor([[1.0, -1, 0], [-1, 1, 0], [0, 0, 0]])
    torch.testing.assert_close(output_similarity(moment.value, readout), expected)
    silent = spectral_redundancy(torch.tensor([[1.0, 2.0], [0.0, 0.0]]))
    torch.testing.assert_close(silent, torch.tensor([[1.0, 0.0], [0.0, 0.0]]))


def test_batches_of_three_read_as_all_at_once() -> None:
    strength = torch.randn(HEADS, DIRECTIONS)
    whole = observation(10, strength)
    panels = {size: Panel(suited_diagnostics(()), (spectrum(strength),)) for size in (3, 10)}
    for size, panel in panels.items():
        for first in range(0, 10, size):
            panel.observe(0, part(whole, slice(first, first + size)))
    few, once = (panel.readings()[0] for panel in panels.values())
    assert few.keys() == once.keys()
    for name in few:
        torch.testing.assert_close(few[name], once[name], rtol=0, atol=1e-12)


def test_readings_follow_a_permutation_of_the_heads() -> None:
    strength, order = torch.randn(HEADS, DIRECTIONS), [2, 0, 1]
    seen, table = observation(4, strength), spectrum(strength)
    moved = replace(table, query=table.query[order], key=table.key[order], strength=strength[order], heads=tuple(order))
    plain, other = Panel(suited_diagnostics(()), (table,)), Panel(suited_diagnostics(()), (moved,))
    plain.observe(0, seen)
    other.observe(0, permuted(seen, order))
    for name, reading in plain.readings()[0].items():
        expected = reading[order][:, order] if reading.shape == (HEADS, HEADS) else reading[order]
        torch.testing.assert_close(other.readings()[0][name], expected, rtol=0, atol=1e-14, msg=name)


def test_noise_belongs_to_the_image_and_the_seed() -> None:
    images = torch.zeros(6, 1, 3, 3)
    whole = noise_like(images, 0, 7)
    assert torch.equal(whole, torch.cat([noise_like(images[:2], 0, 7), noise_like(images[2:], 2, 7)]))
    assert not torch.equal(whole, noise_like(images, 0, 8))
    assert len({float(draw.sum()) for draw in whole}) == 6
    assert 0.5 < noise_like(torch.zeros(40, 1, 5, 5), 0, 0).std() < 1.5
