"""Every backend computes softmax(scale * query @ key^T + log(sizes)) @ value, at any scale, rank and value width."""

from collections.abc import Callable

import pytest
import torch

from attnrx.vit.attention import AttentionCapture, Backend, Eager, Fused, Native, Observation, Observed
from attnrx.vit.kernels.compilation import native_library
from support.layers import LAYERS, Case, by_definition

Sizes = torch.Tensor | None


def ignore(*shown: object) -> None: ...


def capture(*wanted: str) -> Callable[[Case, Sizes], Backend]:
    return lambda case, sizes: AttentionCapture(lambda: sizes, ignore, wanted)


def observed(case: Case, sizes: Sizes) -> Backend:
    readout = torch.zeros(len(case.spec.heads), max(case.spec.value_dims), case.spec.width)
    return Observed(ignore, readout, None if sizes is None else AttentionCapture(lambda: sizes, ignore, ()))


WITH_GRADIENTS: dict[str, Callable[[Case, Sizes], Backend]] = {
    "eager": lambda case, sizes: Eager(lambda: sizes),
    "fused": lambda case, sizes: Fused(),
    "captured": capture(),
    "captured, attention": capture("attention"),
    "captured, class attention": capture("class_attention"),
    "observed": observed,
}
IN_FLOAT32: dict[str, Callable[[Case, Sizes], Backend]] = {
    "native": lambda case, sizes: Native(lambda: sizes),
    "captured, native": capture("keys"),
}
WITH_SIZES = (
    "eager",
    "captured",
    "captured, attention",
    "captured, class attention",
    "observed",
    "native",
    "captured, native",
)


def agree(found: torch.Tensor, expected: torch.Tensor) -> None:
    eps = torch.finfo(found.dtype).eps
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=200 * eps * max(1.0, float(expected.abs().max())))


def require_kernel(backend: str) -> None:
    if "native" in backend and native_library() is None:
        pytest.skip("the kernel needs a C++ compiler")


@pytest.mark.parametrize("backend", WITH_GRADIENTS)
@pytest.mark.parametrize("name", LAYERS)
def test_outputs_and_gradients_are_those_of_the_definition(name: str, backend: str) -> None:
    case = LAYERS[name]
    layer, tokens = case.layer(WITH_GRADIENTS[backend](case, None)), case.inputs()
    expected, found = by_definition(layer, tokens), layer(tokens)
    agree(found, expected)
    with torch.no_grad():  # other paths: kept weights, buffers, parts of the batch
        agree(layer(tokens), expected)
    if not case.dead:
        parameters = [each for each in layer.parameters() if each.numel()]
        gradients = (torch.autograd.grad(each.square().mean(), parameters) for each in (found, expected))
        for ours, theirs in zip(*gradients, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", ["full", "ragged", "svda, ragged", "shared", "mixed"])
def test_an_observation_holds_the_factors_of_its_scores(name: str) -> None:
    found: list[Observation] = []
    case = LAYERS[name]
    readout = torch.zeros(len(case.spec.heads), max(case.spec.value_dims), case.spec.width)
    with torch.no_grad():
        case.layer(Observed(lambda seen: found.append(seen), readout))(case.inputs())
    (seen,) = found
    assert seen.scale == case.spec.scale
    strength = torch.ones(()) if seen.strength is None else seen.strength
    products = torch.einsum("bqhr,bkhr->bhqk", seen.query * strength, seen.key)
    torch.testing.assert_close(case.spec.scale * products, seen.scores, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("backend", IN_FLOAT32)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.slow
def test_outputs_in_float32_are_those_of_the_definition(name: str, backend: str) -> None:
    case = LAYERS[name]
    require_kernel(backend)
    with torch.no_grad():
        expected = by_definition(case.layer(Eager()), case.inputs())
        layer, tokens = case.layer(IN_FLOAT32[backend](case, None), torch.float32), case.inputs(torch.float32)
        used = type(layer.plan(tokens).backend).__name__.lower()
        name = "attentioncapture" if backend.startswith("captured") else backend
        assert used == name or not (any(case.spec.ranks) and any(case.spec.value_dims))
        agree(layer(tokens), expected)


SIZED = (
    "ragged",
    "narrow scores",
    "svda, ragged",
    "shared",
    "mixed",
    "rank zero",
    "1,025 tokens",
    "mixed, 1,025 tokens",
)


@pytest.mark.parametrize("backend", WITH_SIZES)
@pytest.mark.parametrize("name", SIZED)
def test_tokens_count_as_often_as_their_size(name: str, backend: str) -> None:
    case = LAYERS[name]
    require_kernel(backend)
    dtype = torch.float32 if "native" in backend else torch.float64
    if backend == "native" and not any(case.spec.ranks):
        return  # what runs in its place counts every token once
    with torch.no_grad():
        expected = by_definition(case.layer(Eager()), case.inputs(), sizes=case.sizes())
        layer = case.layer(({**WITH_GRADIENTS, **IN_FLOAT32})[backend](case, case.sizes(dtype)), dtype)
        agree(layer(case.inputs(dtype)), expected)


# What observes whole maps needs as many queries as keys.
FEW_QUERIES = [name for name in (*WITH_GRADIENTS, *IN_FLOAT32) if name not in ("captured, attention", "observed")]


@pytest.mark.parametrize("backend", FEW_QUERIES)
@pytest.mark.parametrize("name", ["narrow values", "ragged", "svda", "shared", "mixed"])
def test_few_queries_attend_to_any_number_of_keys_and_heads_without_keys_return_zero(name: str, backend: str) -> None:
    case, make = LAYERS[name], {**WITH_GRADIENTS, **IN_FLOAT32}[backend]
    require_kernel(backend)
    dtype = torch.float32 if backend in IN_FLOAT32 else torch.float64
    exact, layer = case.layer(Eager()), case.layer(make(case, None), dtype)
    with torch.no_grad():
        for queries, keys in ((1, 11), (9, 3), (1, 0), (9, 0)):
            few, among = (case.inputs()[:, :count] for count in (queries, keys))
            agree(layer(few.to(dtype), among.to(dtype)), by_definition(exact, few, among))
    assert exact.output.bias is not None
    torch.testing.assert_close(by_definition(exact, few, among), exact.output.bias.expand(3, 9, -1))
