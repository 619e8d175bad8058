"""Rotary positions and biases of pairs: the definition, backends == eager, subsets of tokens, gradients, export."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from attnrx.vit.attention import Attention, Eager, Fused, Native, Positions, backend_of
from attnrx.vit.spec import AttentionSpec

WIDTH, HEADS, DIM, TOKENS, PREFIX = 24, 3, 8, 29, 2
FULL = ((0, 1, 2, 3),) * HEADS
# ranks, value dimensions, pairs (None: not rotated), a bias per pair, angles of each head, of each image
CASES = {
    "rotary": ((8, 8, 8), (8, 8, 8), FULL, False, False, False),
    "rotary, irregular": ((7, 6, 3), (8, 5, 2), ((0, 3), (1, 2), ()), False, False, False),
    "rotary, angles of heads and images": ((4, 6, 3), (8, 5, 2), ((3,), (1, 2), (0,)), False, True, True),
    "bias": ((8, 8, 8), (8, 8, 8), None, True, False, False),
    "bias, irregular": ((7, 6, 3), (8, 5, 2), None, True, False, True),
    "rotary and bias": ((7, 6, 3), (8, 5, 2), ((0, 3), (1, 2), ()), True, True, True),
}


def case(name: str, dtype: torch.dtype = torch.float64) -> tuple[Attention, torch.Tensor, Positions]:
    ranks, value_dims, pairs, bias, per_head, per_image = CASES[name]
    spec = AttentionSpec(
        "dense" if pairs is None else "rotary", WIDTH, DIM, ranks, (0, 1, 2), 0.4, DIM,
        value_ranks=value_dims, pairs=pairs, pair_bias=bias,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    layer = Attention(spec, Eager()).to(dtype).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(0.4 * drawn(*parameter.shape))
    images = 2 if per_image else 1
    angles = 2 * drawn(images, TOKENS - PREFIX, HEADS if per_head else 1, DIM // 2)
    rotation = (None, None) if pairs is None else (angles.cos(), angles.sin())
    positions = Positions(PREFIX, *rotation, drawn(images, HEADS, TOKENS, TOKENS) if bias else None)
    return layer, drawn(2, TOKENS, WIDTH), positions


def defined(layer: Attention, tokens: torch.Tensor, positions: Positions) -> torch.Tensor:
    """The output by the definition, with complex numbers: head by head, image by image, pair by pair."""
    spec, outputs = layer.spec, []
    projections: Any = layer
    for image, own in enumerate(tokens):
        parts = []
        for head, rank in enumerate(spec.ranks):
            rows = slice(sum(spec.ranks[:head]), sum(spec.ranks[: head + 1]))
            features = slice(sum(spec.value_dims[:head]), sum(spec.value_dims[: head + 1]))
            sides = []
            for side in (projections.scores.query, projections.scores.key):
                sides.append(own @ side.weight[rows].T + side.bias[rows])
            pairs = () if spec.pairs is None else spec.pairs[head]
            still = rank - 2 * len(pairs)
            scores = sides[0][:, :still] @ sides[1][:, :still].T
            for place, pair in enumerate(pairs):
                real, imaginary = still + place, still + len(pairs) + place
                turned = [torch.complex(side[:, real], side[:, imaginary]) for side in sides]
                sides_of: Any = (positions.cos, positions.sin)
                cos, sin = (table[image % len(table), :, head % table.shape[2], pair] for table in sides_of)
                ones = torch.ones(PREFIX, dtype=torch.complex128)
                rotation = torch.cat([ones, torch.complex(cos, sin)])
                query, key = (side * rotation for side in turned)
                scores = scores + (query[:, None] * key.conj()).real
            scores = scores * spec.scale
            if positions.bias is not None:
                scores = scores + positions.bias[image % len(positions.bias), head]
            value = own @ projections.value.weight[features].T + projections.value.bias[features]
            parts.append(scores.softmax(-1) @ value)
        outputs.append(torch.cat(parts, -1) @ projections.output.weight.T + projections.output.bias)
    return torch.stack(outputs)


@pytest.mark.parametrize("name", CASES)
def test_the_reference_is_the_definition(name: str) -> None:
    layer, tokens, positions = case(name)
    torch.testing.assert_close(layer(tokens, None, positions), defined(layer, tokens, positions), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", ["auto", "fused"])
def test_backends_equal_the_reference(name: str, backend: str) -> None:
    layer, tokens, positions = case(name)
    with torch.no_grad():
        expected = layer(tokens, None, positions)
        layer.backend = backend_of(backend)
        torch.testing.assert_close(layer(tokens, None, positions), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("sized", [False, True])
def test_the_kernel_equals_the_reference(name: str, sized: bool) -> None:
    layer, tokens, positions = case(name, torch.float32)
    sizes = torch.rand(2, TOKENS, generator=torch.Generator().manual_seed(1)).to(torch.float32) + 0.5
    with torch.no_grad():
        if sized:  # a size is a bias of its key
            added = sizes.log()[:, None, None, :].expand(-1, HEADS, TOKENS, -1)
            total = added if positions.bias is None else positions.bias + added
            other = Attention(replace(layer.spec, pair_bias=True), Eager()).to(torch.float32)
            other.load_state_dict(layer.state_dict())
            expected = other(tokens, None, Positions(PREFIX, positions.cos, positions.sin, total))
        else:
            expected = layer(tokens, None, positions)
        layer.backend = Native((lambda: sizes) if sized else None)
        torch.testing.assert_close(layer(tokens, None, positions), expected, rtol=0, atol=3e-5)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", [Eager, Fused, Native])
def test_the_first_tokens_can_be_the_queries(name: str, backend: type) -> None:
    layer, tokens, positions = case(name, torch.float32)
    with torch.no_grad():
        expected = layer(tokens, None, positions)
        layer.backend = backend()
        for count in (PREFIX, 9):
            few = layer(tokens[:, :count], tokens, positions)
            torch.testing.assert_close(few, expected[:, :count], rtol=0, atol=3e-5)


@pytest.mark.parametrize("name", CASES)
def test_positions_travel_with_the_patches(name: str) -> None:
    """Shuffled patches with their indices give shuffled outputs; a token of no patch is neither rotated nor biased."""
    layer, tokens, positions = case(name)
    order = torch.stack([torch.randperm(TOKENS - PREFIX, generator=torch.Generator().manual_seed(i)) for i in (1, 2)])
    rows = torch.cat([torch.arange(PREFIX).expand(2, -1), PREFIX + order], 1)[..., None].expand(-1, -1, WIDTH)
    with torch.no_grad():
        expected = layer(tokens, None, positions).gather(1, rows)
        layer.kept_patches = lambda: order
        torch.testing.assert_close(layer(tokens.gather(1, rows), None, positions), expected, rtol=0, atol=1e-12)
        added = positions.of_patches(torch.full((2, TOKENS - PREFIX), -1))
        if added.cos is not None:
            assert bool((added.cos == 1).all()) and bool((added.sin == 0).all())
        if added.bias is not None:
            assert not bool(added.bias[:, :, :, PREFIX:].any()) and not bool(added.bias[:, :, PREFIX:].any())


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_definition(name: str) -> None:
    layer, tokens, positions = case(name)
    found = torch.autograd.grad(layer(tokens, None, positions).square().sum(), list(layer.parameters()))
    wanted = torch.autograd.grad(defined(layer, tokens, positions).square().sum(), list(layer.parameters()))
    for own, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-9, atol=1e-9)


class _Placed(nn.Module):
    def __init__(self, layer: Attention, positions: Positions):
        super().__init__()
        self.layer, self.positions = layer, positions

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.layer(tokens, None, self.positions)


@pytest.mark.parametrize("name", CASES)
def test_exported_layers_equal_the_reference(name: str) -> None:
    layer, tokens, positions = case(name)
    with torch.no_grad():
        expected = layer(tokens, None, positions)
        layer.backend = backend_of("auto")
        program = torch.export.export(_Placed(layer, positions).eval(), (tokens,))
        torch.testing.assert_close(program.module()(tokens), expected, rtol=0, atol=1e-12)
