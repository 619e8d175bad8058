"""A block in one call of the C++ kernel computes what its parts compute, and only where nothing observes them."""

import copy
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import cast

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from attnrx.vit.attention import Attention, AttentionCapture, CapturedAttention, Eager, Native
from attnrx.vit.kernels import compilation
from attnrx.vit.kernels.native_products import NativeLinear
from attnrx.vit.models import attach_tokens_, family_of, load_model
from attnrx.vit.models.parts.mlp import FusedMLP, LowRankLinear
from attnrx.vit.models.working import fused_block as fused_block_module
from attnrx.vit.models.working.fused_block import BlockModules, fused_block
from attnrx.vit.spec import AttentionSpec
from attnrx.vit.tokens import parse_policy

pytestmark = pytest.mark.skipif(compilation.native_library() is None, reason="the kernel needs a C++ compiler")

WIDTH = 48
HF_NAMES = ("ViT", "Dinov2", "Dinov2WithRegisters")


class OneBlock(nn.Module):
    """A pre-norm block; its attention has `ranks` and `value_dims`, its MLP is factored at `mlp_ranks`."""

    def __init__(
        self,
        ranks: tuple[int, ...] = (16, 16, 16),
        value_dims: tuple[int, ...] = (16, 16, 16),
        mlp_ranks: tuple[int | None, int | None] = (None, None),
        scaled: bool = False,
        act: nn.Module | None = None,
        hidden: int = 100,
        biases: tuple[str, ...] = ("query", "key", "value", "output"),
    ):
        super().__init__()
        spec = AttentionSpec(
            "dense", WIDTH, 16, ranks, tuple(range(len(ranks))), 0.25, 16, value_ranks=value_dims, biases=biases
        )
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = Attention(spec)
        pairs = zip(mlp_ranks, ((WIDTH, hidden), (hidden, WIDTH)), strict=True)
        fc1, fc2 = (NativeLinear(a, b) if rank is None else LowRankLinear(a, b, rank) for rank, (a, b) in pairs)
        self.mlp = FusedMLP(fc1, act or nn.GELU(), fc2)
        self.factors = nn.ParameterList(torch.zeros(WIDTH) for _ in range(2 if scaled else 0))
        self.others = nn.ModuleList([nn.Dropout(0.3)])

    def by_parts(self, tokens: torch.Tensor) -> torch.Tensor:
        mlp, factors = self.mlp, self.branch_factors()
        tokens = tokens + self.attention(self.norms[0](tokens)) * (1 if factors[0] is None else factors[0])
        branch = mlp.fc2(mlp.act(mlp.fc1(self.norms[1](tokens))))
        return tokens + branch * (1 if factors[1] is None else factors[1])

    def branch_factors(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return (self.factors[0], self.factors[1]) if len(self.factors) else (None, None)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor | None:
        return fused_block(tokens, self.modules_of_block())

    def modules_of_block(self) -> BlockModules:
        norms = self.norms[0], self.norms[1]
        return BlockModules(norms, self.attention, self.mlp, self.branch_factors(), tuple(self.others))


BLOCKS: dict[str, Callable[[], OneBlock]] = {
    "plain": OneBlock,
    "ragged": lambda: OneBlock((16, 3, 9), (5, 16, 1), hidden=37),
    "heads without scores or values": lambda: OneBlock((16, 0, 9), (5, 4, 0)),
    "low rank": lambda: OneBlock(mlp_ranks=(7, 20)),
    "scaled": lambda: OneBlock(scaled=True),
    "linear MLP": lambda: OneBlock(act=nn.Identity()),
    "some biases": lambda: OneBlock(biases=("query", "value")),
}


@pytest.fixture(autouse=True)
def float32() -> Iterator[None]:
    before, threads = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(before)
    torch.set_num_threads(threads)


def built(name: str) -> OneBlock:
    torch.manual_seed(0)
    block = BLOCKS[name]().eval()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(std=0.3)
    return block


def draws(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def exact(block: OneBlock, tokens: torch.Tensor, sizes: torch.Tensor | None = None) -> torch.Tensor:
    """Returns what the parts of the block compute in float64, by the reference backend."""
    reference = copy.deepcopy(block).double()
    reference.attention.backend = Eager(None if sizes is None else lambda: sizes.double())
    with torch.no_grad():
        return reference.by_parts(tokens.double())


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", [(1, 197), (1, 16), (1, 65), (3, 33), (2, 130)])
@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_equals_its_parts_in_float64(name: str, shape: tuple[int, int], threads: int) -> None:
    torch.set_num_threads(threads)
    block, tokens = built(name), draws(*shape, WIDTH)
    with torch.no_grad():
        found = block(tokens)
    assert found is not None and (found - exact(block, tokens)).abs().max() < 1e-5 * max(1.0, float(found.abs().max()))


@pytest.mark.parametrize("threads", [1, 2])
def test_keys_are_weighted_by_the_sizes_of_their_tokens(threads: int) -> None:
    torch.set_num_threads(threads)
    block, tokens = built("ragged"), draws(3, 50, WIDTH)
    sizes = torch.arange(150.0).reshape(3, 50) % 7
    sizes[:, 0] = 1
    block.attention.backend = Native(lambda: sizes)
    with torch.no_grad():
        found = block(tokens)
    assert found is not None and (found - exact(block, tokens, sizes)).abs().max() < 1e-4


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", ["plain", "heads without scores or values"])
def test_the_attention_of_the_class_token_is_captured(name: str, threads: int) -> None:
    torch.set_num_threads(threads)
    block, tokens = built(name), draws(3, 50, WIDTH)
    sizes = 1 + torch.arange(150.0).reshape(3, 50) % 7
    captured: list[CapturedAttention] = []
    with torch.no_grad():
        for by_parts in (False, True):
            block.attention.backend = AttentionCapture(lambda: sizes, captured.append, ("class_attention",))
            found = block.by_parts(tokens) if by_parts else block(tokens)
            assert found is not None and (found - exact(block, tokens, sizes)).abs().max() < 1e-4
    rows, expected = (each.class_attention for each in captured)
    assert rows is not None and expected is not None and (rows - expected).abs().max() < 1e-6


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("outputs", [1, 5, 40, 65])
def test_only_the_first_tokens_are_computed(outputs: int, threads: int) -> None:
    torch.set_num_threads(threads)
    block, tokens = built("ragged"), draws(3, 65, WIDTH)
    with torch.no_grad():
        found = fused_block(tokens, block.modules_of_block(), outputs)
    assert found is not None and found.shape == (3, outputs, WIDTH)
    assert (found - exact(block, tokens)[:, :outputs]).abs().max() < 1e-4


@pytest.mark.parametrize("name", BLOCKS)
def test_a_changed_weight_changes_the_result(name: str) -> None:
    block, tokens = built(name), draws(1, 40, WIDTH)
    with torch.no_grad():
        block(tokens)
        for parameter in block.parameters():
            parameter.data.mul_(-1.1)
        found = block(tokens)
    assert (found - exact(block, tokens)).abs().max() < 1e-5 * max(1.0, float(found.abs().max()))


# Lists are called by nobody.
PARTS = [name for name, part in OneBlock().named_modules() if name and "forward" in vars(type(part))]


def swap_tensor(block: OneBlock) -> None:
    weight = block.mlp.fc1.get_parameter("weight")
    weight.data = weight.data * 1.5


def same_address_in_another_order(block: OneBlock) -> None:
    query = block.attention.scores.query.weight
    query.data = query.data.T  # square


def other_parameter(block: OneBlock) -> None:
    block.attention.output.bias = nn.Parameter(draws(WIDTH))


def other_module(block: OneBlock) -> None:
    linear = block.attention.value
    copied = copy.deepcopy(linear)
    copied.weight.data.mul_(-1)
    block.attention.value = copied


def other_norm(block: OneBlock) -> None:
    cast(nn.LayerNorm, block.norms[1]).eps = 0.5


def no_bias(block: OneBlock) -> None:
    block.attention.scores.query.bias = None


def in_place(block: OneBlock) -> None:
    block.norms[0].get_parameter("weight").data.mul_(2)


@pytest.mark.parametrize(
    "change", [swap_tensor, same_address_in_another_order, other_parameter, other_module, other_norm, no_bias, in_place]
)
def test_nothing_of_an_earlier_call_is_used(change: Callable[[OneBlock], None]) -> None:
    block, tokens = built("plain"), draws(2, 40, WIDTH)
    with torch.no_grad():
        before = block(tokens)
        assert before is not None and torch.equal(block(tokens), before)
        change(block)
        found = block(tokens)
    assert found is not None and not torch.equal(found, before)
    assert (found - exact(block, tokens)).abs().max() < 1e-4 * float(found.abs().max())


@pytest.mark.parametrize("name", PARTS)
def test_a_part_that_is_observed_or_replaced_is_called(name: str) -> None:
    block, tokens, calls = built("plain"), draws(1, 40, WIDTH), []
    part = block.get_submodule(name)
    with torch.no_grad():
        assert block(tokens) is not None
        for register in (part.register_forward_hook, part.register_forward_pre_hook):
            handle = register(lambda *call: calls.append(call))
            assert block(tokens) is None
            handle.remove()
        part.forward = part.forward
        assert block(tokens) is None
        del part.forward
        assert block(tokens) is not None


def test_blocks_by_parts_where_something_is_recorded_or_of_another_kind() -> None:
    block, tokens = built("plain"), draws(1, 40, WIDTH)
    assert block(tokens) is None  # gradients
    with torch.no_grad():
        assert block(tokens.double()) is None and block(draws(1, 9, WIDTH)) is None
        with torch.autocast("cpu"):
            assert block(tokens) is None
        with FlopCounterMode(display=False):  # its hooks of all modules count the parts
            assert block(tokens) is None
        for act in (nn.ReLU(), nn.GELU("tanh")):
            block.mlp.act = act
            assert block(tokens) is None
        block.mlp.act = nn.GELU()
        block.attention.backend = Eager()
        assert block(tokens) is None
        block.attention.backend = Native()
        assert block(tokens) is not None
        block.train()
        assert block(tokens) is None


def timm_model() -> nn.Module:
    timm = pytest.importorskip("timm")
    shape = {"img_size": 64, "patch_size": 8, "embed_dim": WIDTH, "depth": 4, "num_heads": 3, "num_classes": 5}
    return timm.create_model("vit_tiny_patch16_224", init_values=0.5, **shape)


def transformers_model(name: str) -> nn.Module:
    library = pytest.importorskip("transformers")
    shape = {"hidden_size": WIDTH, "num_hidden_layers": 4, "num_attention_heads": 3, "image_size": 64, "patch_size": 8}
    config = getattr(library, f"{name}Config")(**shape, num_labels=5, intermediate_size=4 * WIDTH)
    return getattr(library, f"{name}ForImageClassification")(config)


MODELS = {"timm": timm_model} | {name: partial(transformers_model, name) for name in HF_NAMES}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("policy", ["", "ward:0.5@2,3", "ward(relevance=0.3):0.5@2,3", "evit:0.7@3"])
@pytest.mark.parametrize("name", MODELS)
def test_models_are_computed_block_by_block(
    name: str, policy: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    source = MODELS[name]()
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model = load_model(source.eval()).eval()
    if policy:
        attach_tokens_(model, family_of(model), parse_policy(policy))
    images, calls = draws(2, 3, 64, 64), []
    compute = fused_block_module.native_block
    monkeypatch.setattr(fused_block_module, "native_block", lambda *all_: calls.append(1) or compute(*all_))
    with torch.no_grad():
        found = model(images)
        assert len(calls) == 4
        copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        assert torch.equal(copied(images), found)
        for part in copied.modules():
            if isinstance(part, nn.LayerNorm):
                part.register_forward_hook(lambda *call: None)
        calls.clear()
        expected = copied(images)
        assert not calls
    assert (found - expected).abs().max() < 1e-4 * max(1.0, float(expected.abs().max()))
