"""Formulas of published token reducers, and where an option chooses between them and the default."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnrx.vit.attention.backends import sized_softmax
from attnrx.vit.tokens import TokenPolicy, TokenState, parse_policy
from attnrx_lab.tokens import ATS, EViT


def state_of(**statistics: Any) -> TokenState:
    """Two images with a class token and six patches."""
    generator = torch.Generator().manual_seed(0)
    indices = torch.arange(6).expand(2, -1)
    return TokenState(
        torch.randn(2, 7, 4, generator=generator), 1, torch.ones(2, 7), indices, unmasked=True, **statistics
    )


def drawn(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("normalized", [True, False])
def test_the_fused_token_of_evit_is_a_mean_or_the_published_sum(normalized: bool) -> None:
    state = state_of(class_attention=drawn(2, 3, 7).softmax(-1))
    reduction = EViT(normalized=normalized).reduce(state, 4, nn.Module())
    assert reduction.extra is not None and state.class_attention is not None
    weights = state.class_attention[:, :, 1:].mean(1)
    for image in range(2):
        dropped = sorted(set(range(6)) - set(reduction.kept[image].tolist()))
        own = weights[image, dropped]
        own = own / own.sum() if normalized else own
        torch.testing.assert_close(reduction.extra[image, 0], own @ state.patches[image, dropped])
    assert parse_policy("evit(normalized=false):0.7@4").reducer == EViT(normalized=False)
    assert str(TokenPolicy.staged(EViT(), 0.7, (4,))) == "evit:0.7@4"


def test_the_significance_of_ats_is_scaled_in_every_head() -> None:
    attention, norms = drawn(2, 3, 7).softmax(-1), 1 + 9 * drawn(2, 3, 7)
    norms[1, 2] = 0  # a head without values
    found = ATS().significance(state_of(class_attention=attention, value_norms=norms))
    for image in range(2):
        heads = [(attention[image, head] * norms[image, head])[1:] for head in range(3)]
        parts = [head / head.sum() for head in heads if bool(head.sum() > 0)]
        torch.testing.assert_close(found[image], sum(parts) / len(parts))  # type: ignore[arg-type]


def test_the_gradient_of_a_dropped_key_is_bounded_and_others_are_those_of_the_formula() -> None:
    logits = 2 * drawn(1, 1, 3, 5) - 1
    logits[..., 4] = 3.0  # the dropped key has the largest score
    sizes, direction = torch.tensor([[1.0, 1.0, 1.0, 1.0, 0.0]], requires_grad=True), drawn(1, 1, 3, 5)
    formula = logits.exp() * sizes[:, None, None]
    formula = formula / formula.sum(-1, keepdim=True)
    (expected,) = torch.autograd.grad((formula * direction).sum(), sizes, retain_graph=True)
    attention = sized_softmax(logits, sizes)
    torch.testing.assert_close(attention, formula)
    (found,) = torch.autograd.grad((attention * direction).sum(), sizes)
    torch.testing.assert_close(found[:, :4], expected[:, :4])
    assert float(found[0, 4].abs()) < float(expected[0, 4].abs())
    sized_softmax(1e4 * logits, sizes).sum().backward()
    assert sizes.grad is not None and bool(sizes.grad.isfinite().all())
