"""The C++ kernel of linear maps computes what PyTorch computes, for every shape, and so do MLPs by it."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from attnrx.support.errors import InvalidInput
from attnrx.vit.kernels import compilation
from attnrx.vit.kernels.native_products import NativeLinear, native_maps
from attnrx.vit.models.parts.mlp import FusedMLP, LowRankLinear

pytestmark = pytest.mark.skipif(compilation.native_library() is None, reason="the kernel needs a C++ compiler")

# Rows, inputs and outputs: single ones, widths beside and between panels, several blocks of rows and of inputs.
SHAPES = ((1, 1, 1), (1, 192, 1000), (5, 7, 3), (3, 5, 8), (4, 9, 17), (197, 192, 28), (50, 28, 192), (250, 2048, 40))


@pytest.fixture(autouse=True)
def float32():
    before, threads = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(before)
    torch.set_num_threads(threads)


def draws(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gelu", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_one_map_equals_the_product_in_float64(shape, gelu, bias, threads):
    rows, inputs, outputs = shape
    torch.set_num_threads(threads)
    features, weight = draws(rows, inputs), draws(outputs, inputs, seed=1)
    added = draws(outputs, seed=2) if bias else None
    expected = F.linear(features.double(), weight.double(), None if added is None else added.double())
    expected = F.gelu(expected) if gelu else expected
    found = native_maps(features, [weight], [added], [gelu])
    assert found.shape == (rows, outputs)
    assert (found - expected).abs().max() <= 3e-6 * max(expected.abs().max(), 1)


@pytest.mark.parametrize("rows", [1, 6, 97, 197, 600])
@pytest.mark.parametrize("threads", [1, 2])
def test_several_maps_equal_one_after_the_other(rows, threads):
    torch.set_num_threads(threads)
    widths = (24, 5, 96, 33, 24)
    weights = [draws(b, a, seed=a) / a**0.5 for a, b in pairwise(widths)]
    features, gelus = draws(2, rows, 24), [False, True, False, True]
    found = native_maps(features, weights, [None] * len(weights), gelus)
    expected = features.double()
    for weight, gelu in zip(weights, gelus, strict=True):
        expected = F.linear(expected, weight.double())
        expected = F.gelu(expected) if gelu else expected
    assert (found - expected).abs().max() < 3e-6


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rows", [1, 97, 600])
def test_maps_of_the_same_features_are_written_side_by_side(rows, threads):
    torch.set_num_threads(threads)
    features, widths = draws(2, rows, 24), (5, 40, 96)
    weights, biases = [draws(width, 24, seed=width) for width in widths], [draws(5), None, draws(96)]
    found = native_maps(features, weights, biases, [False, True, False], joined=True)
    expected = [F.linear(features, *pair) for pair in zip(weights, biases, strict=True)]
    expected[1] = F.gelu(expected[1])
    assert (found - torch.cat(expected, -1)).abs().max() < 1e-5


def test_gelu_keeps_nan_and_infinity_and_is_exact_to_rounding():
    one = torch.ones(1, 1)
    special = torch.tensor([[float("nan")], [float("inf")], [-float("inf")], [0.0], [-100.0], [100.0]])
    found = native_maps(special, [one], [None], [True]).flatten()
    assert found[0].isnan() and found[1] == float("inf") and found[3] == 0 and abs(found[4]) < 1e-30 and found[5] == 100
    line = torch.linspace(-12, 12, 100_001)[:, None]
    assert (native_maps(line, [one], [None], [True]) - F.gelu(line.double())).abs().max() < 1e-6


def test_strided_features_and_no_rows():
    features, weight = draws(6, 4, 10).transpose(0, 1), draws(3, 10)
    found = native_maps(features, [weight], [None], [False])
    assert torch.allclose(found, F.linear(features, weight), atol=1e-5)
    assert native_maps(draws(0, 10), [weight], [None], [False]).shape == (0, 3)


@pytest.mark.parametrize("wrong", [draws(4, 11), draws(4, 10).double()])
def test_what_the_kernel_would_misread_is_refused(wrong):
    with pytest.raises(InvalidInput):
        native_maps(wrong, [draws(3, 10)], [None], [False])


def mlp(ranks: tuple[int | None, int | None]) -> FusedMLP:
    torch.manual_seed(0)
    pairs = zip(ranks, ((48, 192), (192, 48)), strict=True)
    fc1, fc2 = (NativeLinear(a, b) if rank is None else LowRankLinear(a, b, rank) for rank, (a, b) in pairs)
    return FusedMLP(fc1, nn.GELU(), fc2).eval()


@pytest.mark.parametrize("ranks", [(None, None), (24, None), (None, 17), (24, 17)])
def test_a_fused_mlp_equals_its_parts_and_counts_their_operations(ranks):
    fused, features = mlp(ranks), draws(2, 600, 48)
    expected = fused.fc2(fused.act(fused.fc1(features)))
    with torch.no_grad():
        calls = FlopCounterMode(display=False)
        with calls:
            found = fused(features)
        assert [str(one) for one in calls.get_flop_counts()["Global"]] == ["attnrx.native_maps"]
        own = FlopCounterMode(display=False)
        with own:
            fused.fc2(fused.act(fused.fc1(features)))
    assert (found - expected).abs().max() < 1e-5
    assert calls.get_total_flops() == own.get_total_flops()


@pytest.mark.parametrize("part", ["fc1", "act", "fc2"])
def test_a_hook_on_a_part_of_an_mlp_sees_its_call(part):
    fused, seen = mlp((None, None)), []
    fused.get_submodule(part).register_forward_hook(lambda *call: seen.append(call[2]))
    with torch.no_grad():
        fused(draws(2, 600, 48))
    assert len(seen) == 1


def test_a_changed_weight_changes_the_result():
    fused, features = mlp((None, 17)), draws(2, 600, 48)
    with torch.no_grad():
        before = fused(features)
        fused.fc2.first.weight.mul_(2)  # type: ignore[union-attr]
        after = fused(features)
        assert not torch.equal(before, after)
        assert torch.allclose(after, fused.fc2(fused.act(fused.fc1(features))), atol=1e-5)


@pytest.mark.parametrize("activation", [nn.GELU("tanh"), nn.SiLU(), nn.ReLU()])
def test_other_activations_are_computed_by_themselves(activation):
    fused, features = mlp((None, None)), draws(2, 600, 48)
    fused.act = activation
    with torch.no_grad():
        assert torch.allclose(fused(features), fused.fc2(activation(fused.fc1(features))), atol=1e-6)
