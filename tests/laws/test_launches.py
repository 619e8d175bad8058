"""How many operations a pass starts on a device that is no CPU: on a GPU the start of each takes longer than it runs.

Counted on the meta device, which takes the path of a GPU and computes nothing.
"""

from collections import Counter
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import attnrx as rx
from attnrx.vit.models import attach_tokens_, family_of
from support.operations import is_computing

VIT = "vit_tiny_patch16_224"


class Operations(TorchDispatchMode):
    """Counts operations that compute."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_computing(func):
            self.counts[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def operations(model: nn.Module, images: int = 1) -> Counter[str]:
    placed = model.eval().to("meta")
    with torch.no_grad():
        placed(torch.empty(images, 3, 224, 224, device="meta"))  # makes what is kept between passes
        with Operations() as counter:
            placed(torch.empty(images, 3, 224, 224, device="meta"))
    return counter.counts


def reference() -> nn.Module:
    return timm.create_model(VIT, depth=4).float()


def adopted(policy: str | None = None, rules: str | None = None) -> nn.Module:
    model: nn.Module = rx.load(reference())
    if rules is not None:
        diagnosis = rx.diagnose(model, torch.randn(2, 3, 224, 224))
        model = rx.realize(model, rx.prescribe(diagnosis, rules))
    if policy is not None:
        attach_tokens_(model, family_of(model), rx.tokens.parse_policy(policy))
    return model


@pytest.fixture(autouse=True)
def _as_on_a_gpu(single_precision: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention is one operation, with its output in the layout of the fused kernels; on meta it is several."""

    whole = F.scaled_dot_product_attention

    def fused(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any, **options: Any
    ) -> torch.Tensor:
        if not query.is_meta:  # the proof of adoption runs on the CPU
            return whole(query, key, value, *others, **options)
        (batch, heads, tokens, _width), width = query.shape, value.shape[-1]
        return query.new_zeros(batch, tokens, heads, width).transpose(1, 2)

    monkeypatch.setattr(F, "scaled_dot_product_attention", fused)


@pytest.mark.parametrize("rules", [None, "hidden=uniform_rank:0.5,metric=weights"])
def test_a_model_starts_no_more_operations_than_that_of_its_library(rules: str | None) -> None:
    ours, theirs = operations(adopted(rules=rules)), operations(reference())
    assert ours.total() <= theirs.total(), (ours - theirs, theirs - ours)
    # With many tokens the last block computes the class token alone: a norm and a product more, of smaller ones.
    ours, theirs = operations(adopted(rules=rules), 64), operations(reference(), 64)
    assert ours.total() <= theirs.total() + 2, (ours - theirs, theirs - ours)


@pytest.mark.parametrize(
    ("policies", "most"),
    [
        (("ward:0.7@2", "ward:0.7@2,3"), (31, 34)),
        (("tome:0.7@2", "tome:0.7@2,3"), (26, 26)),
        (("class_attention:0.7@2", "class_attention:0.7@2,3"), (15, 16)),
    ],
)
def test_stages_start_few_operations(policies: tuple[str, ...], most: tuple[int, ...]) -> None:
    """Of the first stage, and of a later one; with what later layers do more."""
    before = operations(adopted())
    for policy, limit in zip(policies, most, strict=True):
        counts = operations(adopted(policy))
        assert counts.total() - before.total() <= limit, counts - before
        before = counts
