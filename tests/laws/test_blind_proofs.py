"""Attention that is not plain is refused, whatever the outputs of the model hide."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attnrx as rx
from attnrx.support.errors import NotSupported
from attnrx.vit.models import family_of

PIXELS = torch.randn(24, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def renormalized(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = (query @ key.mT / math.sqrt(query.shape[-1])).softmax(-1).square()
    return weights / weights.sum(-1, keepdim=True) @ value


def tempered(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, scale=1.7 / math.sqrt(query.shape[-1]))


class Other(timm.models.vision_transformer.Attention):
    """Attention of timm's class that computes something else."""

    compute: Callable[..., Tensor]

    def forward(self, x: Tensor, attn_mask: Any = None, is_causal: bool = False) -> Tensor:
        batch, count, width = x.shape
        query, key, value = self.qkv(x).reshape(batch, count, 3, 3, -1).permute(2, 0, 3, 1, 4)
        return self.proj(type(self).compute(query, key, value).transpose(1, 2).reshape(batch, count, width))


KINDS = {name: type(name, (Other,), {"compute": staticmethod(function)}) for name, function in
         {"causal": causal, "renormalized": renormalized, "tempered": tempered}.items()}  # fmt: skip


class Module(nn.Module):
    """A user's module, which returns the logits with something else beside them."""

    def __init__(self, around: Callable[[Tensor], Any], kind: str = "causal"):
        super().__init__()
        torch.manual_seed(0)
        self.net: Any = timm.create_model(
            "vit_tiny_patch16_224", img_size=16, patch_size=8, embed_dim=12, depth=2, num_heads=3, num_classes=5,
            class_token=False, global_pool="avg",
        ).double()  # fmt: skip
        for parameter in self.net.parameters():
            nn.init.normal_(parameter, std=0.5)
        for block in self.net.blocks if kind else ():
            block.attn.__class__ = KINDS[kind]
        self.around = around

    def forward(self, pixels: Tensor) -> Any:
        return self.around(self.net(pixels))


def beside(value: float) -> Callable[[Tensor], Tensor]:
    return lambda logits: torch.cat([logits, torch.full_like(logits[:, :1], value)], 1)


AROUND: dict[str, Callable[[Tensor], Any]] = {
    **{f"{value:g}": beside(value) for value in (1.0, 1e2, 1e4, 1e8)},
    "dictionary": lambda logits: {"id": torch.full_like(logits[:, :1], 1e8), "logits": logits},
    "map": lambda logits: beside(1e6)(logits)[:, :, None, None].expand(-1, -1, 4, 4).contiguous(),
    "one place of a map": lambda logits: F.pad(logits[:, :, None, None].expand(-1, -1, 3, 3), (0, 1, 0, 1), value=1e8),
    "small logits": lambda logits: beside(1.0)(1e-3 * logits),
    "a sigmoid": lambda logits: beside(1.0)((40 * logits).sigmoid()),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", AROUND)
def test_other_attention_is_refused_beside_anything(name: str, kind: str) -> None:
    for call in (rx.load, lambda model: rx.shrink(model, PIXELS, macs=0.7)):
        model = Module(AROUND[name], kind).eval()
        try:
            found: Any = call(model)
        except NotSupported:
            continue
        # What is adopted nevertheless has units alone: its attention is not read.
        found = found.model if isinstance(found, rx.Shrunk) else found
        assert not family_of(found).reads_attention(found)


@pytest.mark.parametrize("name", AROUND)
def test_plain_attention_is_read_beside_anything(name: str) -> None:
    model = Module(AROUND[name], "").eval()
    loaded = rx.load(model)
    assert type(loaded) is Module and family_of(loaded).reads_attention(loaded)


@pytest.mark.parametrize(("value", "word"), [(float("-inf"), "-inf"), (float("nan"), "NaN"), (float("inf"), "inf")])
@pytest.mark.parametrize("kind", ["", "causal"])
def test_a_column_without_numbers_is_named(value: float, word: str, kind: str) -> None:
    with pytest.raises(NotSupported, match=rf"{word} at \[5\] of every image"):
        rx.load(Module(beside(value), kind).eval())


class Counting(timm.models.vision_transformer.Attention):
    """Attention that counts its calls."""

    calls: Tensor

    def forward(self, x: Tensor, attn_mask: Any = None, is_causal: bool = False) -> Tensor:
        self.calls += 1
        return super().forward(x, attn_mask, is_causal)


def test_attention_that_changes_itself_is_refused_and_loading_changes_no_model() -> None:
    model = Module(lambda logits: logits, "").eval()
    for block in model.net.blocks:
        block.attn.__class__ = Counting
        block.attn.register_buffer("calls", torch.zeros(()))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(NotSupported, match="changes its own calls when it is called"):
        rx.load(model)
    assert all(torch.equal(model.state_dict()[key], tensor) for key, tensor in before.items())
