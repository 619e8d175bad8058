"""Balanced directions: the identity, the optimum and the units, for Grams of every kind."""

import pytest
import torch

from attnrx.change.decompositions import Balanced, balance, factor_directions, svd_directions
from attnrx.support.errors import InvalidInput
from attnrx.support.shapes import Tensor

HEADS, SIZE = 3, 8


def features(rank: int = 40, scale: Tensor | None = None) -> Tensor:
    """Samples of correlated features of this rank, [HEADS, rank, SIZE]."""
    samples = torch.randn(HEADS, rank, SIZE) @ torch.randn(HEADS, SIZE, SIZE) / SIZE
    return samples if scale is None else samples * scale


def gram(rows: Tensor) -> Tensor:
    return rows.mT @ rows


def rotated(values: Tensor) -> Tensor:
    turn = torch.linalg.qr(torch.randn(HEADS, SIZE, SIZE)).Q
    return (turn * values) @ turn.mT


GRADED = torch.logspace(-6, 3, SIZE, dtype=torch.float64)  # Grams from 1e-12 to 1e6
LOW, HIGH = torch.arange(SIZE) < 3, (torch.arange(SIZE) >= 3) & (torch.arange(SIZE) < 6)


def in_another_basis(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    turn = torch.linalg.qr(torch.randn(SIZE, SIZE)).Q
    return tuple((turn @ torch.diag(side.double()) @ turn.T).repeat(HEADS, 1, 1) for side in (left, right))


GRAMS = {
    "full": lambda: (gram(features()), gram(features())),
    "left deficient": lambda: (gram(features(5)), gram(features())),
    "both deficient": lambda: (gram(features(3)), gram(features(6))),
    "left nothing": lambda: (torch.zeros(HEADS, SIZE, SIZE), gram(features())),
    "one head nothing": lambda: (gram(features()) * torch.tensor([1.0, 0.0, 1.0])[:, None, None], gram(features())),
    "disjoint, turned": lambda: in_another_basis(LOW, HIGH),
    "overlapping, turned": lambda: in_another_basis(LOW | HIGH, ~LOW),
    "both graded": lambda: (gram(features(40, GRADED)), gram(features(40, GRADED))),
    "graded spectrum": lambda: (rotated(torch.logspace(0, -18, SIZE)), gram(features())),
    "huge and tiny": lambda: (gram(features()) * 1e12, gram(features(6)) * 1e-18),
    "float32": lambda: (gram(features().float()), gram(features(5).float())),
}


def product(balanced: Balanced, first: int = 0) -> Tensor:
    """The form's change of basis without the first directions: the identity when none is left out."""
    left, right, strength = balanced.left[:, first:], balanced.right[:, first:], balanced.strength[:, first:]
    return (left * strength[..., None]).mT @ right


def energy(form: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """The squared error of a form, [HEADS], in the metric of two Grams."""
    return torch.einsum("hij,hik,hkl,hjl->h", form, left, form, right)


@pytest.mark.parametrize("kind", GRAMS)
def test_keeping_every_direction_is_the_original_for_any_input(kind: str):
    balanced = balance(*GRAMS[kind]())
    assert (product(balanced) - torch.eye(SIZE)).abs().max() <= 1e-10


@pytest.mark.parametrize("kind", GRAMS)
def test_strengths_are_finite_positive_and_descending(kind: str):
    strength = balance(*GRAMS[kind]()).strength
    assert bool(torch.isfinite(strength).all()) and bool((strength > 0).all())
    assert bool((strength.diff(dim=-1) <= 0).all())


@pytest.mark.parametrize("kind", GRAMS)
def test_error_is_the_energy_left_out(kind: str):
    left, right = (side.double() for side in GRAMS[kind]())
    balanced = balance(left, right)
    rounding = 1e-6 if kind == "float32" else 1e-9  # the negative eigenvalues of a float32 sum are no metric
    everything = energy(torch.eye(SIZE).repeat(HEADS, 1, 1), left, right)
    possible = left.norm(dim=(1, 2)) * right.norm(dim=(1, 2))
    for rank in range(SIZE + 1):
        expected = balanced.strength[:, rank:].square().sum(-1)
        measured = energy(product(balanced, rank), left, right)
        slack = rounding * everything + 1e-15 * possible + 1e-20 * (possible == 0)
        assert bool(((measured - expected).abs() <= slack).all())


@pytest.mark.parametrize("kind", ["full", "left deficient", "both deficient", "one head nothing"])
def test_seen_directions_have_unit_energy_and_are_uncorrelated(kind: str):
    grams = GRAMS[kind]()
    balanced = balance(*grams)
    for head, rank in enumerate(balanced.rank):
        for side, metric in zip((balanced.left, balanced.right), grams, strict=True):
            seen = side[head, :rank]
            assert (seen @ metric[head] @ seen.T - torch.eye(rank)).abs().sum() <= 1e-6


@pytest.mark.parametrize(
    ("kind", "rank"),
    [
        ("full", 8),
        ("left deficient", 5),
        ("both deficient", 3),
        ("left nothing", 0),
        ("disjoint, turned", 0),
        ("float32", 5),
        ("overlapping, turned", 3),
    ],
)
def test_rank_counts_the_directions_that_the_metric_sees(kind: str, rank: int):
    assert balance(*GRAMS[kind]()).rank == (rank,) * HEADS


@pytest.mark.parametrize(
    "kind", ["left deficient", "both deficient", "overlapping, turned", "disjoint, turned", "left nothing"]
)
def test_every_null_direction_has_no_energy_on_one_side(kind: str):
    grams = GRAMS[kind]()
    balanced = balance(*grams)
    for head, rank in enumerate(balanced.rank):
        sizes = []
        for side, metric in zip((balanced.left, balanced.right), grams, strict=True):
            null = side[head, rank:]
            largest = null.square().sum(-1) * metric[head].norm().clamp_min(1e-300)
            sizes.append((null @ metric[head] @ null.T).diagonal().abs() / largest)
        assert bool((torch.minimum(*sizes) <= 1e-13).all())


@pytest.mark.parametrize("rank", [1, 3, 6])
def test_no_other_form_of_the_same_rank_is_nearer(rank: int):
    left, right = GRAMS["full"]()
    balanced = balance(left, right)
    best = balanced.strength[:, rank:].square().sum(-1)
    first, second = balanced.left[:, :rank].mT * balanced.strength[:, None, :rank], balanced.right[:, :rank]
    for size in (1e-3, 1e-2, 1e-1, 1.0):
        for _ in range(20):
            moved = (first + size * torch.randn_like(first)) @ (second + size * torch.randn_like(second))
            assert bool((energy(torch.eye(SIZE) - moved, left, right) >= best * (1 - 1e-12)).all())


def test_strengths_are_the_singular_values_of_the_whitened_form():
    left, right = features(), features()
    whitened = torch.linalg.svdvals(left @ right.mT)[:, :SIZE]
    assert torch.allclose(balance(gram(left), gram(right)).strength, whitened, rtol=1e-9)
    assert torch.allclose(factor_directions(left, right).strength, whitened, rtol=1e-12)


def test_error_in_the_metric_is_the_measured_score_error_over_all_pairs():
    query, key = features(50), features(60)
    balanced = balance(gram(query) / 50, gram(key) / 60)
    for rank in (0, 2, 5):
        missed = query @ product(balanced, rank) @ key.mT
        assert torch.allclose(missed.square().mean((1, 2)), balanced.strength[:, rank:].square().sum(-1), rtol=1e-9)


def test_contradicting_metrics_keep_the_form_to_rounding_in_the_units_of_the_features():
    left, right = gram(features(40, GRADED)), gram(features(40, GRADED.flip(0)))
    missed = GRADED[:, None] * (product(balance(left, right)) - torch.eye(SIZE)) / GRADED
    assert missed.abs().max() <= 1e-12


def test_singular_directions_of_rows_are_the_svd_of_the_product():
    left, right = torch.randn(HEADS, SIZE, 30), torch.randn(HEADS, SIZE, 20)
    balanced = svd_directions(left, right)
    dense = left.mT @ right
    assert torch.allclose(balanced.strength, torch.linalg.svdvals(dense)[:, :SIZE], rtol=1e-13)
    for rows in (balanced.left @ left, balanced.right @ right):
        assert (rows @ rows.mT - torch.eye(SIZE)).abs().max() <= 1e-13
    rebuilt = (balanced.left @ left).mT @ (balanced.strength[..., None] * (balanced.right @ right))
    assert (rebuilt - dense).norm() <= 1e-13 * dense.norm()


def test_singular_directions_keep_the_digits_that_a_gram_loses():
    turn = torch.linalg.qr(torch.randn(HEADS, 30, SIZE)).Q
    values = torch.logspace(0, -10, SIZE)
    left = torch.linalg.qr(torch.randn(HEADS, SIZE, SIZE)).Q * values @ turn.mT
    right = torch.linalg.qr(torch.randn(HEADS, 30, SIZE)).Q.mT
    expected = values.repeat(HEADS, 1)
    by_rows = (svd_directions(left, right).strength / expected - 1).abs()
    by_gram = (balance(left @ left.mT, right @ right.mT).strength / expected - 1).abs()
    assert by_rows.max() <= 1e-5 < 1e-4 <= by_gram.max()


@pytest.mark.parametrize("width", [0, 1, 5, 8, 20])
def test_rows_shorter_than_their_number_are_rewritten_exactly(width: int):
    left, right = torch.randn(HEADS, SIZE, width), torch.randn(HEADS, SIZE, 20)
    balanced = svd_directions(left, right)
    assert balanced.rank == (min(width, SIZE),) * HEADS
    assert (product(balanced) - torch.eye(SIZE)).abs().max() <= 1e-12


@pytest.mark.parametrize("shape", [(0, SIZE), (HEADS, 0), (HEADS, 1)])
def test_no_heads_and_hardly_any_directions_are_allowed(shape: tuple[int, int]):
    heads, size = shape
    rows = torch.randn(heads, size, 5)
    for balanced in (svd_directions(rows, rows), balance(rows @ rows.mT, rows @ rows.mT)):
        assert balanced.left.shape == balanced.right.shape == (heads, size, size)
        assert len(balanced.rank) == heads and balanced.strength.shape == (heads, size)


@pytest.mark.parametrize(
    ("damage", "message"),
    [(lambda gram: gram * float("nan"), "not finite"), (lambda gram: gram + torch.triu(gram, 1), "not symmetric")],
)
def test_what_is_no_gram_is_refused(damage, message: str):
    good = gram(features())
    for grams in ((damage(good), good), (good, damage(good))):
        with pytest.raises(InvalidInput, match=message):
            balance(*grams)


def test_a_gram_with_the_rounding_of_a_subtraction_is_not_refused():
    samples = 100 + 1e-4 * torch.randn(HEADS, 500, SIZE)
    samples[..., 0] = 100.0  # a feature that never moves: its variance is rounding, and may come out negative
    mean = samples.mean(1, keepdim=True)
    covariance = samples.mT @ samples / 500 - mean.mT @ mean
    assert (product(balance(covariance, gram(features()))) - torch.eye(SIZE)).abs().max() <= 1e-10
