"""Relative positions by axis, as in SAM and ViTDet: the definition, backends == eager, and smaller models."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attnrx as rx
from attnrx.support.errors import InvalidInput, NotSupported
from attnrx.support.modules import tensors_of
from attnrx.vit.attention import Attention, Eager, Fused, Native
from attnrx.vit.attention.backends import Portable
from attnrx.vit.models import family_of, library_form
from attnrx.vit.spec import AttentionSpec
from support.users_models import SIZE, WIDTH, made

pytestmark = pytest.mark.filterwarnings("ignore")
ROWS, COLUMNS, HEADS, DIM = 3, 5, 3, 8
TOKENS = ROWS * COLUMNS
RANKS = {"whole": ((8, 8, 8), (8, 8, 8)), "irregular": ((7, 0, 3), (8, 5, 2))}  # of scores, and of values
MODELS = ["SAM, a border of zeros", "SAM of timm", "ViTDet"]


def case(name: str, dtype: torch.dtype = torch.float64) -> tuple[Attention, Tensor]:
    ranks, value_dims = RANKS[name]
    spec = AttentionSpec(
        "axial", WIDTH, DIM, ranks, (0, 1, 2), 0.4, DIM, value_ranks=value_dims, window=(ROWS, COLUMNS)
    )
    layer, generator = Attention(spec, Eager()).to(dtype).eval(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in (*layer.parameters(), tokens := torch.empty(2, TOKENS, WIDTH, dtype=dtype)):
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return layer, tokens


def defined(layer: Attention, tokens: Tensor) -> Tensor:
    """The output by the definition: head by head, one pair of tokens after the other."""
    parts: Any = layer
    spec, scores, outputs = layer.spec, parts.scores, []
    for head in range(HEADS):
        rows = slice(sum(spec.ranks[:head]), sum(spec.ranks[: head + 1]))
        features = slice(sum(spec.value_dims[:head]), sum(spec.value_dims[: head + 1]))
        query, key = ((tokens @ side.weight[rows].T + side.bias[rows]) for side in (scores.query, scores.key))
        pairs = spec.scale * query @ key.mT
        for i in range(TOKENS):
            for j in range(TOKENS):
                down = scores.down[rows, i // COLUMNS - j // COLUMNS + ROWS - 1]
                right = scores.right[rows, i % COLUMNS - j % COLUMNS + COLUMNS - 1]
                pairs[:, i, j] = pairs[:, i, j] + query[:, i] @ (down + right)
        outputs.append(pairs.softmax(-1) @ (tokens @ parts.value.weight[features].T + parts.value.bias[features]))
    return torch.cat(outputs, -1) @ parts.output.weight.T + parts.output.bias


@pytest.mark.parametrize("name", RANKS)
def test_the_reference_is_the_definition(name: str) -> None:
    layer, tokens = case(name)
    with torch.no_grad():
        torch.testing.assert_close(layer(tokens), defined(layer, tokens), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", RANKS)
@pytest.mark.parametrize("backend", [Fused, Portable, Native])
def test_backends_equal_the_reference(name: str, backend: type) -> None:
    layer, tokens = case(name, torch.float32 if backend is Native else torch.float64)
    with torch.no_grad():
        expected = layer(tokens)
        layer.backend = backend()
        limit = 3e-5 if backend is Native else 1e-12
        torch.testing.assert_close(layer(tokens), expected, rtol=0, atol=limit)


def test_tokens_that_fill_no_window_are_refused() -> None:
    layer, tokens = case("whole")
    with pytest.raises(InvalidInput, match=r"14 tokens in a layer .* window of \(3, 5\)"):
        layer(tokens[:, :-1])


def outputs(model: nn.Module) -> dict[str, Tensor]:
    images = torch.randn(2, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad():
        return tensors_of(model(images))


def projections(model: nn.Module) -> list[Any]:
    return [part.qkv for part in model.modules() if hasattr(part, "rel_pos_h")]


@pytest.mark.parametrize("name", MODELS)
def test_directions_that_no_score_needs_are_removed_without_a_change(name: str) -> None:
    """Half of the rows of every query repeat the others, so that the vectors of all distances must follow the rest."""
    model, half = made(name), WIDTH // 4
    with torch.no_grad():
        for qkv in projections(model):
            for rows in (qkv.weight, qkv.bias):
                query = rows[:WIDTH].unflatten(0, (2, 2, half))  # heads, halves
                query[:, 1] = query[:, 0]
    loaded = rx.load(model)
    images = torch.randn(4, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = rx.prescribe(rx.diagnose(loaded, images), f"qk=uniform_rank:{half}")
    for by in ("compress", "mask"):
        small = rx.realize(loaded, found, by=by)
        assert_same(outputs(small), outputs(model))
    assert all(layer.spec.ranks == (half, half) for layer in family_of(small).attention(rx.realize(loaded, found)))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_without_some_heads_is_of_its_own_class(name: str) -> None:
    loaded = rx.load(made(name))
    images = torch.randn(4, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = rx.prescribe(rx.diagnose(loaded, images), "heads=total_rank:0.5")
    small = rx.realize(loaded, found)
    assert not any(isinstance(part, Attention) for part in library_form(small).modules())
    assert sum(qkv.out_features for qkv in projections(library_form(small))) == 3 * 3 * WIDTH // 2
    assert_same(outputs(small), outputs(rx.realize(loaded, found, by="mask")))


@pytest.mark.parametrize("name", MODELS)
def test_tokens_of_grids_are_neither_pruned_nor_merged(name: str) -> None:
    loaded = rx.load(made(name))
    with pytest.raises(NotSupported, match="divides grids of tokens into sequences inside its blocks"):
        family_of(loaded).token_layout(loaded)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for tensor, other in zip(found.values(), expected.values(), strict=True):
        torch.testing.assert_close(tensor, other, rtol=0, atol=1e-8)
