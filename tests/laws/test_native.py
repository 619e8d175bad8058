"""The kernel in C++ equals attention written out, for any widths, strides, sizes and threads, and is seen to run."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from attnrx.support.errors import KernelWarning, NotSupported
from attnrx.vit.attention import Attention, AttentionCapture, AttentionContext, Auto, Eager, Fused, Native, backend_of
from attnrx.vit.kernels import compilation
from attnrx.vit.kernels.native_attention import JointFeatures, native_attention, native_joint_attention
from attnrx.vit.spec import AttentionSpec
from attnrx_lab.shared_attention import native_mixed_attention
from support.kernel_names import attention_kernel

pytestmark = pytest.mark.skipif(compilation.native_library() is None, reason="the kernel needs a C++ compiler")

# Rank and width of the values of two heads each, queries and keys: narrower and wider than a vector, a panel and a
# tile, and none of them a multiple of it; a rank of zero reads out the mean.
SHAPES = (
    (((64, 64),), 197, 197),
    (((40, 37), (0, 5), (1, 1)), 133, 133),
    (((16, 32), (17, 33)), 14, 16),
    (((3, 130),), 29, 31),
    (((70, 15),), 1, 5),
)


Sides = tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]
"""Queries, keys and values, in a list of as many parts as there are shapes of heads."""


def drawn(widths: tuple[tuple[int, int], ...], queries: int, keys: int, seed: int = 0) -> Sides:
    """Parts of one projection, heads first, so that neither heads nor tokens lie side by side."""
    generator = torch.Generator().manual_seed(seed)

    def side(tokens: int, width: int) -> torch.Tensor:
        wide = torch.randn(3, tokens, 2 * width + 5, generator=generator, dtype=torch.float32)
        return wide[..., : 2 * width].unflatten(2, (2, width)).transpose(1, 2)

    return (
        [side(queries, rank) for rank, _ in widths],
        [side(keys, rank) for rank, _ in widths],
        [side(keys, value_dims) for _, value_dims in widths],
    )


def reference(sides: Sides, sizes: torch.Tensor | None, scale: float) -> torch.Tensor:
    read = []
    for query, key, value in zip(*sides, strict=True):
        scores = scale * query.double() @ key.double().transpose(2, 3)
        if sizes is not None:
            scores = scores + sizes.double().log()[:, None, None]
        read.append((torch.softmax(scores, -1) @ value.double()).transpose(1, 2).flatten(2))
    return torch.cat(read, -1)


@pytest.mark.parametrize("sized", [False, True])
@pytest.mark.parametrize(("widths", "queries", "keys"), SHAPES)
def test_the_kernel_equals_attention_written_out(
    widths: tuple[tuple[int, int], ...], queries: int, keys: int, sized: bool
) -> None:
    sides, sizes = drawn(widths, queries, keys), None
    if sized:
        sizes = torch.randint(0, 4, (3, keys), generator=torch.Generator().manual_seed(1)).float()  # 0 has left
        sizes[:, 0] = 1
    wanted = reference(sides, sizes, 0.3)
    for threads in (1, 2, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            found = native_attention(*sides, sizes, 0.3)
        finally:
            torch.set_num_threads(before)
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=3e-5)


def test_scores_of_any_size_are_mixed_and_what_is_no_number_stays_with_its_image() -> None:
    sides = drawn(((20, 20),), 30, 30)
    sides[0][0] *= 300  # most weights are zero then, and their scores far below any exponent
    torch.testing.assert_close(
        native_attention(*sides, None, 1.0).double(), reference(sides, None, 1.0), rtol=0, atol=2e-2
    )
    assert torch.isfinite(native_attention(*sides, None, 1.0)).all()
    for side in range(3):
        spoiled = copy.deepcopy(sides)
        spoiled[side][0][1, 0, 7, 3] = torch.nan
        found, wanted = native_attention(*spoiled, None, 0.01), reference(spoiled, None, 0.01)
        assert torch.equal(found.isnan(), wanted.isnan()) and found.isnan().any()


@pytest.mark.parametrize("size", [1e38, 2.5e38, 3.3e38])
@pytest.mark.parametrize("sign", [1, -1])
def test_scores_near_the_largest_float_are_those_of_pytorch(size: float, sign: int) -> None:
    """Where a product overflows, PyTorch has no number either, in the same rows."""
    query, key = (torch.ones(1, 1, count, 1, dtype=torch.float32) for count in (9, 20))
    key *= sign * size * torch.linspace(0.5, 1, 20, dtype=torch.float32)[:, None]
    query[:, :, 4] = 3  # its scores overflow
    value = torch.arange(20, dtype=torch.float32)[None, None, :, None]
    found = native_attention([query], [key], [value], None, 1.0)
    expected = torch.softmax(query @ key.transpose(2, 3), -1) @ value
    torch.testing.assert_close(found, expected.flatten(1, 2), equal_nan=True, rtol=1e-5, atol=1e-5)
    assert bool(found[0, :4].isfinite().all())


def test_directions_that_heads_share_are_read_where_they_lie() -> None:
    sides = drawn(((9, 9),), 12, 12)
    sides[1][0] = sides[1][0][:, :1].expand(-1, 2, -1, -1)
    torch.testing.assert_close(
        native_attention(*sides, None, 0.3).double(), reference(sides, None, 0.3), rtol=0, atol=3e-5
    )


def test_profilers_counters_and_meta_tensors_see_the_operation() -> None:
    sides = drawn(((40, 37), (0, 5)), 14, 16)
    assert attention_kernel(lambda: native_attention(*sides, None, 0.3)) == "native"
    with FlopCounterMode(display=False) as counter:
        found = native_attention(*sides, None, 0.3)
    assert counter.get_total_flops() == 2 * 3 * 2 * 14 * 16 * (40 + 37 + 5)
    query, key, value = ([part.to("meta") for part in side] for side in sides)
    assert native_attention(query, key, value, None, 0.3).shape == found.shape == (3, 14, 2 * (37 + 5))


# Directions per block, heads with their value dimensions, queries and keys.
MIXED = (
    ((64, 0, 33, 1), ((2, 37), (1, 5)), 133, 133),
    ((32, 32, 32), ((3, 16),), 14, 16),
    ((5,), ((1, 0), (2, 130)), 29, 31),
    ((9, 2), ((2, 3),), 1, 5),
)


@pytest.mark.parametrize("sized", [False, True])
@pytest.mark.parametrize(("ranks", "heads", "queries", "keys"), MIXED)
def test_maps_of_blocks_are_mixed_for_every_head(
    ranks: tuple[int, ...], heads: tuple[tuple[int, int], ...], queries: int, keys: int, sized: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    count = sum(own for own, _ in heads)
    features = [torch.randn(3, tokens, 2 * sum(ranks) + 3, generator=generator).float() for tokens in (queries, keys)]
    query, key = (each[..., 1 : 1 + sum(ranks)] for each in features)
    values = [
        torch.randn(3, keys, own, value_dims, generator=generator).float().transpose(1, 2) for own, value_dims in heads
    ]
    mix, sizes = torch.randn(count, len(ranks), generator=generator).float() / 3, None
    if sized:
        sizes = torch.randint(0, 4, (3, keys), generator=generator).float()
        sizes[:, 0] = 1
    strength = mix.repeat_interleave(torch.tensor(ranks), 1)[None, :, None]
    mixed = (query[:, None] * strength).split([own for own, _ in heads], 1)
    wanted = reference((list(mixed), [key[:, None]] * len(heads), values), sizes, 1.0)
    for threads in (1, 2, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            found = native_mixed_attention(query, key, values, ranks, mix, sizes)
        finally:
            torch.set_num_threads(before)
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=3e-4)
    assert attention_kernel(lambda: native_mixed_attention(query, key, values, ranks, mix, sizes)) == "native"
    with FlopCounterMode(display=False) as counter:
        native_mixed_attention(query, key, values, ranks, mix, sizes)
    products = sum(ranks) + count * len(ranks) + sum(own * value_dims for own, value_dims in heads)
    assert counter.get_total_flops() == 2 * 3 * queries * keys * products
    meta = [part.to("meta") for part in values]
    assert native_mixed_attention(query.to("meta"), key.to("meta"), meta, ranks, mix, None).shape == found.shape


@pytest.mark.parametrize("sized", [False, True])
def test_features_in_one_row_give_the_same_as_separate_ones(sized: bool) -> None:
    ranks, value_dims, scale = (9, 0, 4), (5, 7, 12), 0.3
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(3, 14, 2 * sum(ranks) + sum(value_dims), generator=generator, dtype=torch.float32)
    sizes = torch.randint(1, 5, (3, 14), generator=generator).float() if sized else None
    query, key, value = features.split((sum(ranks), sum(ranks), sum(value_dims)), -1)
    sides = [
        [own[:, None] for own in part.split(widths, -1)]
        for part, widths in ((query, ranks), (key, ranks), (value, value_dims))
    ]
    wanted = native_attention(sides[0], sides[1], sides[2], sizes, scale)
    for given in (features, features.transpose(1, 2).contiguous().transpose(1, 2)):
        torch.testing.assert_close(
            native_joint_attention(JointFeatures(given, ranks, value_dims, scale), sizes), wanted, rtol=0, atol=0
        )
    joint = JointFeatures(features, ranks, value_dims, scale)
    assert attention_kernel(lambda: native_joint_attention(joint, sizes)) == "native"
    with FlopCounterMode(display=False) as counter:
        native_joint_attention(joint, sizes)
    assert counter.get_total_flops() == 2 * 3 * 14 * 14 * (sum(ranks) + sum(value_dims))
    assert native_joint_attention(joint._replace(features=features.to("meta")), None).shape == (3, 14, 24)


SPEC = AttentionSpec("dense", 12, 4, (3, 0, 2), (0, 1, 2), 0.5, 4, value_ranks=(4, 1, 3))
TOKENS = torch.randn(2, 11, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float32)


def context_of(tokens: torch.Tensor) -> AttentionContext:
    with torch.no_grad():
        return AttentionContext.of(tokens)


def test_inference_in_float32_on_a_cpu_runs_on_it_and_nothing_else_does() -> None:
    free = context_of(TOKENS)
    for backend in (Auto(), Native(), AttentionCapture(lambda: None, print, ())):
        assert type(backend.at(SPEC, free)) is Native
        for other in ({"free": False}, {"device": "cuda"}, {"dtype": torch.float64}, {"dtype": torch.bfloat16}):
            assert type(backend.at(SPEC, free._replace(**other))) is not Native
    assert type(AttentionCapture(lambda: None, print, ("keys",)).at(SPEC, free)) is AttentionCapture
    layer = Attention(SPEC, Native()).float()
    layer(TOKENS).sum().backward()  # and gradients are those of Fused
    assert layer.value.weight.grad is not None and layer.value.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("sizes", [None, torch.arange(1.0, 23.0).view(2, 11)])
def test_a_layer_is_what_it_is_on_the_eager_backend(sizes: torch.Tensor | None) -> None:
    layer = Attention(SPEC, Native(lambda: sizes)).float().eval()
    with torch.no_grad():
        found, few = layer(TOKENS), layer(TOKENS[:, :1], TOKENS)
        layer.backend = (
            Eager() if sizes is None else AttentionCapture(lambda: sizes, lambda shown: None, ("attention",))
        )
        wanted = layer(TOKENS)
        with torch.autocast("cpu", torch.bfloat16):
            layer.backend = Native(lambda: sizes)
            lower = layer(TOKENS)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    torch.testing.assert_close(few, wanted[:, :1], rtol=0, atol=1e-6)
    torch.testing.assert_close(lower.float(), wanted, rtol=0, atol=2e-3)


def test_what_is_shown_to_a_reducer_goes_with_the_kernel() -> None:
    sizes = torch.arange(1.0, 23.0).view(2, 11)
    for wanted in (("keys",), ("class_attention",)):
        shown: list[Any] = []
        layer = Attention(SPEC, AttentionCapture(lambda: sizes, shown.append, wanted)).float().eval()
        reference = layer(TOKENS).detach()  # with gradients: PyTorch's kernel
        with torch.no_grad():
            assert attention_kernel(partial(layer, TOKENS)) == "native"
            torch.testing.assert_close(layer(TOKENS), reference, rtol=0, atol=1e-6)
        first, last = (getattr(each, wanted[0]) for each in (shown[0], shown[-1]))
        torch.testing.assert_close(first, last, rtol=0, atol=1e-6)


@pytest.fixture
def unbuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("ATTNRX_CACHE", str(tmp_path))
    monkeypatch.setattr(compilation, "shipped_library", lambda name: tmp_path / name)  # that of a wheel
    compilation.native_library.cache_clear()
    yield tmp_path
    compilation.native_library.cache_clear()


@pytest.mark.slow
def test_a_compiler_without_openmp_builds_it_for_one_thread(unbuilt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, plain = compilation.cpp_compiler(), unbuilt / "plain"
    if not compiler:
        pytest.skip("there is no C++ compiler")
    plain.write_text(f'#!/bin/sh\nfor word; do [ "$word" = -fopenmp ] && exit 1; done\nexec {compiler[0]} "$@"\n')
    plain.chmod(0o755)
    monkeypatch.setenv("CXX", str(plain))
    assert compilation.native_library() is not None
    sides = drawn(((20, 20),), 30, 30)
    torch.testing.assert_close(
        native_attention(*sides, None, 0.3).double(), reference(sides, None, 0.3), rtol=0, atol=3e-5
    )


def test_without_a_kernel_models_run_on_pytorchs(unbuilt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = context_of(TOKENS.repeat(99, 1, 1))
    monkeypatch.setenv(compilation.BUILD, "0")
    assert compilation.native_library() is None
    assert not isinstance(Auto().at(SPEC, free), Native) and type(Native().at(SPEC, free)) is Fused
    with pytest.raises(NotSupported, match="'auto' runs without"):
        backend_of("native")
    compilation.native_library.cache_clear()
    monkeypatch.delenv(compilation.BUILD)
    failing = unbuilt / "failing"
    failing.write_text("#!/bin/sh\necho unknown flag >&2\nexit 1\n")
    failing.chmod(0o755)
    monkeypatch.setenv("CXX", f"{failing} --quick")
    with pytest.warns(KernelWarning, match=r"could not be built with .*failing --quick .*\(unknown flag\)"):
        assert compilation.native_library() is None
    assert not list(unbuilt.glob("kernels/*"))
