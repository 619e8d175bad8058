"""SAM and ViTDet: relative positions by axis, backends == eager, smaller models, and merging inside layers."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attnrx as rx
from attnrx.decide.planning import measured_costs
from attnrx.decide.planning.cost_table import exact_cost_table, prescribed_costs
from attnrx.decide.planning.measured_costs import PlanTimer, represents_all
from attnrx.decide.planning.space import Choices, Space
from attnrx.nouns.effort import PlanSettings
from attnrx.nouns.target import Target
from attnrx.support.errors import InvalidInput, NotSupported
from attnrx.support.modules import tensors_of
from attnrx.vit.attention import Attention, Eager, Fused, Native
from attnrx.vit.attention.backends import Portable
from attnrx.vit.costs import count_product_macs
from attnrx.vit.models import attach_tokens_, family_of, library_form, working_copy
from attnrx.vit.models.observation_hooks import counted_by_spec
from attnrx.vit.models.parts.merging_in_layers import LayerRun, from_windows, in_windows
from attnrx.vit.spec import AttentionSpec
from attnrx.vit.tokens import parse_policy
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


POLICIES = ["ward:0.7@2", "ward:0.75/0.4@2,3"]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", MODELS)
def test_a_mask_equals_merging_inside_layers_and_costs_equal_a_count(name: str, policy: str) -> None:
    loaded = rx.load(made(name))
    images = torch.randn(4, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = rx.prescribe(rx.diagnose(loaded, images), f"qk=total_rank:0.5 tokens={policy}")
    small, masked = (rx.realize(loaded, found, by=by) for by in ("compress", "mask"))
    assert_same(outputs(small), outputs(masked))
    pairs = zip(*(outputs(each).values() for each in (small, loaded)), strict=True)
    assert any((one - other).abs().max() > 1e-4 for one, other in pairs)
    family = family_of(small)
    with counted_by_spec(small, family):
        assert family.costs(small).product_macs == count_product_macs(small, images[:1])
    assert family.costs(small).macs < 0.95 * family.costs(rx.realize(loaded, without_tokens(found))).macs
    assert family.costs(small) == prescribed_costs(loaded, found)
    assert all(part.params >= 0 for part in family.costs(small).parts.values())


def without_tokens(found: rx.Prescription) -> rx.Prescription:
    return replace(found, tokens=None)


@pytest.mark.parametrize("name", MODELS)
def test_merging_equal_tokens_changes_nothing(name: str) -> None:
    """All patches are equal, so merging changes no output. Zeros at the border are equal to each other."""
    model = made(name)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "pos" in path:
                parameter.zero_()
    loaded = rx.load(model)
    image = torch.randn(1, 3, 1, 1, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    images = image.expand(2, -1, SIZE, SIZE).contiguous()
    small = copy.deepcopy(loaded)
    attach_tokens_(small, family_of(small), parse_policy("ward:0.6@2"))
    with torch.no_grad():
        assert_same(tensors_of(small(images)), tensors_of(loaded(images)))


@pytest.mark.parametrize("name", MODELS)
def test_a_policy_that_keeps_all_tokens_is_the_original(name: str) -> None:
    loaded = rx.load(made(name))
    small = copy.deepcopy(loaded)
    attach_tokens_(small, family_of(small), parse_policy("ward:1.0@2"))
    for found, expected in zip(outputs(small).values(), outputs(loaded).values(), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(("policy", "why"), [("tome:0.7@2", "needs keys"), ("class_attention:0.7@2", "class token")])
def test_reducers_that_need_the_layer_before_are_refused(policy: str, why: str) -> None:
    loaded = rx.load(made("SAM of timm"))
    with pytest.raises(NotSupported, match=why):
        attach_tokens_(loaded, family_of(loaded), parse_policy(policy))


def test_a_block_that_merges_is_refused_outside_its_model() -> None:
    loaded = rx.load(made("SAM of timm"))
    attach_tokens_(loaded, family_of(loaded), parse_policy("ward:0.7@2"))
    block: Any = loaded.get_submodule("blocks.1")
    with pytest.raises(InvalidInput, match="called alone"):
        block(torch.zeros(1, 4, 4, WIDTH, dtype=torch.float64))
    assert outputs(loaded)  # the model itself still runs


@pytest.mark.parametrize("name", MODELS)
def test_the_planner_knows_what_merging_inside_layers_costs(name: str) -> None:
    loaded = rx.load(made(name))
    images = torch.randn(8, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    working, diagnosis = working_copy(loaded), rx.diagnose(loaded, images, moments=True)
    space = Space.of(working, diagnosis, Target.parse("macs=0.7x"), PlanSettings())
    table, before = exact_cost_table(space, "macs"), family_of(loaded).costs(loaded).macs
    for pruned in ((0, 4, 0), (0, 0, 8), (0, 4, 6)):
        choices = replace(Choices.nothing(space.depth), num_pruned=pruned)
        exact = prescribed_costs(working, space.prescription(choices)).macs / before
        assert table.total(choices) == pytest.approx(exact, rel=0.03)


def test_layers_of_different_shapes_are_planned_for_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No block represents the others, so the costs start from the MACs. Here, every latency is the share of MACs."""
    loaded = rx.load(made("SAM of timm"))
    images = torch.randn(8, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    working, settings = working_copy(loaded), PlanSettings()
    space = Space.of(working, rx.diagnose(loaded, images, moments=True), Target.parse("latency=0.7x"), settings)
    whole = family_of(working).costs(working).macs

    def shares(self: PlanTimer, models: Mapping[str, nn.Module], rounds: int) -> dict[str, float]:
        return {name: family_of(model).costs(model).macs / whole for name, model in models.items()}

    monkeypatch.setattr(PlanTimer, "latency_shares", shares)
    monkeypatch.setattr(measured_costs, "cached_cost_table", lambda space, settings, measure: measure())
    assert not represents_all(space)
    table = PlanTimer(space, settings, rx.data.image_set(images)).cost_table()
    assert table.problem() is None and table.total(Choices.nothing(space.depth)) == pytest.approx(1)
    choices = replace(Choices.nothing(space.depth), num_pruned=(0, 4, 0), mlp=(2, 2, 2))
    exact = prescribed_costs(working, space.prescription(choices)).macs / whole
    assert table.total(choices) == pytest.approx(exact, rel=0.06)


def test_padding_has_no_weight_in_the_mean_of_an_mlp() -> None:
    """A grid of one token in a window of two: the second one is padding, and both are merged."""
    loaded = rx.load(made("SAM of timm"))
    reduction: Any = attach_tokens_(loaded, family_of(loaded), parse_policy("ward:0.7@2"))
    run, token = LayerRun(1), torch.randn(1, 1, 1, WIDTH)
    run.grid, run.window, run.sources, run.num_merged = (1, 1), (1, 2), torch.zeros(1, 2, dtype=torch.int64), 1
    with reduction.call.setting(run=run):
        assert torch.equal(reduction.enter_mlp(token), token[0])
        assert torch.equal(reduction.leave_mlp(token[0]), token)


def test_windows_are_put_together_again() -> None:
    grid = torch.randn(2, 5, 7, 3)
    parts = in_windows(grid, (2, 3))
    assert parts.shape == (2 * 3 * 3, 6, 3)
    assert torch.equal(parts[1], grid[0, :2, 3:6].flatten(0, 1))  # windows follow each other in a row
    assert torch.equal(from_windows(parts, (2, 3), (2, 5, 7)), grid)


@pytest.mark.parametrize("name", RANKS)
@pytest.mark.parametrize("backend", [Eager, Fused, Portable, Native])
def test_tokens_that_remain_in_a_window_keep_their_positions(name: str, backend: type) -> None:
    layer, tokens = case(name, torch.float32 if backend is Native else torch.float64)
    kept = torch.tensor([[0, 3, 7, 8, 14], [1, 2, 6, 11, 13]])
    remaining = tokens.gather(1, kept[..., None].expand(-1, -1, WIDTH))
    with torch.no_grad():
        found = []
        layer.backend, layer.kept_patches = backend(), lambda: kept
        found = layer(remaining)
        # The same attention by a mask: keys that are gone have the size 0.
        sizes = torch.zeros(2, TOKENS, dtype=tokens.dtype).scatter(1, kept, 1.0)
        layer.backend, layer.kept_patches = Eager(lambda: sizes), None
        expected = layer(tokens).gather(1, kept[..., None].expand(-1, -1, WIDTH))
    torch.testing.assert_close(found, expected, rtol=0, atol=3e-5 if backend is Native else 1e-12)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for tensor, other in zip(found.values(), expected.values(), strict=True):
        torch.testing.assert_close(tensor, other, rtol=0, atol=1e-8)
