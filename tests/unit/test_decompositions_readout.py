"""The readout of heads with fewer features: exact when all are kept, best when refit for all heads at once."""

import inspect

import pytest
import torch

from attnrx.decompositions.output_projection import Circuit, Readout, read_out, readout_directions
from attnrx.errors import InvalidInput
from attnrx.shapes import Tensor

HEADS, SIZE, WIDTH = 3, 4, 10
FEATURES = HEADS * SIZE


def samples(kind: str) -> Tensor:
    """Outputs of correlated heads with a mean, [samples, FEATURES]."""
    mixing = torch.randn(FEATURES, FEATURES) / 3
    if kind == "few":
        return torch.randn(5, FEATURES) @ mixing + 2
    outputs = torch.randn(400, FEATURES) @ mixing + torch.randn(FEATURES)
    if kind == "copied heads":
        outputs[:, SIZE : 2 * SIZE] = outputs[:, :SIZE]
    if kind == "dead head":
        outputs[:, :SIZE] = 1.5
    if kind == "graded":
        outputs *= torch.logspace(-6, 3, FEATURES)
    return outputs


KINDS = ["plain", "few", "copied heads", "dead head", "graded"]


def circuit(outputs: Tensor, *, rank: int = WIDTH, bias: bool = True) -> Circuit:
    weight = torch.randn(WIDTH, rank) @ torch.randn(rank, FEATURES) / 3
    mean = outputs.mean(0)
    covariance = (outputs - mean).T @ (outputs - mean) / len(outputs)
    return Circuit(weight, torch.randn(WIDTH) if bias else None, covariance, mean, HEADS)


def original(circuit: Circuit, outputs: Tensor) -> Tensor:
    return outputs @ circuit.weight.T + (0.0 if circuit.bias is None else circuit.bias)


def reduced(readout: Readout, outputs: Tensor) -> Tensor:
    heads = outputs.unflatten(1, (HEADS, SIZE)).unbind(1)
    kept = [head @ rows.T for head, rows in zip(heads, readout.projection, strict=True)]
    return torch.cat(kept, dim=1) @ readout.weight.T + readout.bias


def leading(*ranks: int) -> Tensor:
    return torch.arange(SIZE) < torch.tensor(ranks)[:, None]


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("rank", [WIDTH, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_keeping_everything_is_the_original_for_any_input(kind: str, rank: int, joint: bool):
    outputs = samples(kind)
    whole = circuit(outputs, rank=rank)
    readout = read_out(whole, readout_directions(whole), leading(SIZE, SIZE, SIZE), joint=joint)
    elsewhere = torch.randn(50, FEATURES)
    assert torch.allclose(reduced(readout, elsewhere), original(whole, elsewhere), rtol=0, atol=1e-8)
    assert readout.error <= 1e-12 * whole.energy


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("ranks", [(0, 0, 0), (1, 1, 1), (2, 0, 4), (3, 3, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_error_is_the_one_measured_on_the_samples(kind: str, ranks: tuple[int, ...], joint: bool):
    outputs = samples(kind)
    whole = circuit(outputs)
    readout = read_out(whole, readout_directions(whole), leading(*ranks), joint=joint)
    measured = (reduced(readout, outputs) - original(whole, outputs)).square().sum(1).mean()
    assert readout.error == pytest.approx(float(measured), rel=1e-7, abs=1e-10 * whole.energy)


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_mean_of_the_readout_is_kept(bias: bool, joint: bool):
    outputs = samples("plain")
    whole = circuit(outputs, bias=bias)
    readout = read_out(whole, readout_directions(whole), leading(1, 2, 0), joint=joint)
    assert torch.allclose(reduced(readout, outputs).mean(0), original(whole, outputs).mean(0), rtol=1e-11)


@pytest.mark.parametrize("ranks", [(1, 1, 1), (2, 0, 4), (3, 3, 1), (4, 4, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_refitting_all_heads_at_once_is_never_worse(kind: str, ranks: tuple[int, ...]):
    whole = circuit(samples(kind))
    directions = readout_directions(whole)
    joint, alone = (read_out(whole, directions, leading(*ranks), joint=choice).error for choice in (True, False))
    assert joint <= alone + 1e-12 * whole.energy


def test_refitting_uses_what_other_heads_know():
    whole = circuit(samples("copied heads"))
    directions = readout_directions(whole)
    # The second head is a copy of the first, so nothing is lost without it, but only where W is refit.
    assert read_out(whole, directions, leading(4, 0, 4)).error <= 1e-12 * whole.energy
    assert read_out(whole, directions, leading(4, 0, 4), joint=False).error >= 1e-2 * whole.energy


@pytest.mark.parametrize("size", [1e-3, 1e-1, 10.0])
def test_no_other_readout_of_the_same_features_is_nearer(size: float):
    outputs = samples("plain")
    whole = circuit(outputs)
    readout = read_out(whole, readout_directions(whole), leading(2, 1, 3))
    for _ in range(20):
        moved = Readout(
            readout.projection,
            readout.weight + size * torch.randn_like(readout.weight),
            readout.bias + size * torch.randn_like(readout.bias),
            0.0,
        )
        assert (reduced(moved, outputs) - original(whole, outputs)).square().sum(1).mean() > readout.error


def test_one_head_alone_loses_the_squared_strengths_left_out():
    outputs = samples("plain")[:, :SIZE]
    mean = outputs.mean(0)
    covariance = (outputs - mean).T @ (outputs - mean) / len(outputs)
    whole = Circuit(torch.randn(WIDTH, SIZE), None, covariance, mean, 1)
    directions = readout_directions(whole)
    for rank in range(SIZE + 1):
        expected = float(directions.strength[0, rank:].square().sum())
        for joint in (True, False):  # with one head there is nothing that a refit could add
            readout = read_out(whole, directions, (torch.arange(SIZE) < rank)[None], joint=joint)
            assert readout.error == pytest.approx(expected, rel=1e-9, abs=1e-12 * whole.energy)


def test_keeping_nothing_leaves_the_mean_and_loses_all_energy():
    outputs = samples("plain")
    whole = circuit(outputs)
    readout = read_out(whole, readout_directions(whole), leading(0, 0, 0))
    assert readout.weight.shape == (WIDTH, 0)
    assert readout.error == pytest.approx(whole.energy, rel=1e-12)
    assert torch.allclose(readout.bias, original(whole, outputs).mean(0))


def test_kept_features_need_not_be_the_leading_ones():
    whole = circuit(samples("plain"))
    keep = torch.tensor([[False, True, False, True]] * HEADS)
    directions = readout_directions(whole)
    readout = read_out(whole, directions, keep)
    assert torch.equal(readout.projection[1], directions.left[1, [1, 3]])
    assert readout.error > read_out(whole, directions, leading(2, 2, 2)).error


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 5}, "heads that divide"),
        ({"heads": 0}, "heads that divide"),
        ({"weight": torch.full((WIDTH, FEATURES), torch.nan)}, "weight of the readout"),
        ({"bias": torch.full((WIDTH,), torch.inf)}, "bias of the readout"),
        ({"mean": torch.full((FEATURES,), torch.nan)}, "mean of the readout"),
        ({"covariance": torch.triu(torch.ones(FEATURES, FEATURES))}, "not symmetric"),
    ],
)
def test_a_circuit_that_cannot_be_is_refused(change: dict, message: str):
    whole = circuit(samples("plain"))
    given = {name: getattr(whole, name) for name in ("weight", "bias", "covariance", "mean", "heads")}
    with pytest.raises(InvalidInput, match=message):
        Circuit(**(given | change))


def test_a_choice_of_another_shape_is_refused():
    whole = circuit(samples("plain"))
    with pytest.raises(InvalidInput, match="directions and keep"):
        inspect.unwrap(read_out)(whole, readout_directions(whole), leading(1, 1, 1)[:, :2])
