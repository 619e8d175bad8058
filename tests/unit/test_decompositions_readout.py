"""The outputs of heads from fewer directions: exact when all are kept, best when refit for all heads at once."""

import pytest
import torch

from attnrx.change.decompositions import Balanced, balance, read_out
from attnrx.support.shapes import Tensor

HEADS, SIZE = 3, 4
FEATURES = HEADS * SIZE


def samples(kind: str) -> Tensor:
    """Centred outputs of correlated heads, [samples, FEATURES]."""
    mixing = torch.randn(FEATURES, FEATURES) / 3
    outputs = torch.randn(5 if kind == "few" else 400, FEATURES) @ mixing
    if kind == "copied heads":
        outputs[:, SIZE : 2 * SIZE] = outputs[:, :SIZE]
    if kind == "dead head":
        outputs[:, :SIZE] = 1.5
    if kind == "graded":
        outputs *= torch.logspace(-6, 3, FEATURES)
    return outputs - outputs.mean(0)


KINDS = ["plain", "few", "copied heads", "dead head", "graded"]


def directions_of(outputs: Tensor) -> tuple[Balanced, Tensor]:
    """The directions of every head in the metric of its outputs, and the covariance of all."""
    covariance = outputs.T @ outputs / len(outputs)
    own = outputs.unflatten(1, (HEADS, SIZE)).transpose(0, 1)
    return balance(own.mT @ own / len(outputs), torch.eye(SIZE).repeat(HEADS, 1, 1)), covariance


def error(outputs: Tensor, directions: Balanced, keep: Tensor, weight: Tensor) -> float:
    heads = outputs.unflatten(1, (HEADS, SIZE)).unbind(1)
    kept = [head @ rows[own].T for head, rows, own in zip(heads, directions.left, keep, strict=True)]
    return float((torch.cat(kept, dim=1) @ weight.T - outputs).square().sum(1).mean())


def leading(*ranks: int) -> Tensor:
    return torch.arange(SIZE) < torch.tensor(ranks)[:, None]


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_keeping_everything_is_the_original_for_any_input(kind: str, joint: bool):
    directions, covariance = directions_of(samples(kind))
    weight = read_out(directions, leading(SIZE, SIZE, SIZE), covariance if joint else None)
    assert error(torch.randn(50, FEATURES), directions, leading(SIZE, SIZE, SIZE), weight) <= 1e-14


@pytest.mark.parametrize("ranks", [(1, 1, 1), (2, 0, 4), (3, 3, 1), (4, 4, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_refitting_all_heads_at_once_is_never_worse(kind: str, ranks: tuple[int, ...]):
    outputs = samples(kind)
    directions, covariance = directions_of(outputs)
    joint, alone = (
        error(outputs, directions, leading(*ranks), read_out(directions, leading(*ranks), given))
        for given in (covariance, None)
    )
    assert joint <= alone + 1e-12 * float(covariance.trace())
    # Each head alone loses its squared strengths.
    left_out = directions.strength.square() * ~leading(*ranks)
    assert alone == pytest.approx(float(left_out.sum()), rel=1e-7, abs=1e-10 * float(covariance.trace()))


@pytest.mark.parametrize("size", [1e-3, 1e-1, 10.0])
def test_no_other_weight_of_the_same_features_is_nearer(size: float):
    outputs = samples("plain")
    directions, covariance = directions_of(outputs)
    weight = read_out(directions, leading(2, 1, 3), covariance)
    least = error(outputs, directions, leading(2, 1, 3), weight)
    for _ in range(20):
        moved = weight + size * torch.randn_like(weight)
        assert error(outputs, directions, leading(2, 1, 3), moved) > least
