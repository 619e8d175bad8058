"""The cached weights of a layer are never older than its parameters, however these were changed."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from attnrx.attention import Attention
from attnrx.spec import AttentionSpec

SPEC = AttentionSpec("svda", 12, 4, (4, 1, 2), (0, 1, 2), 0.5, 4, "kept", value_ranks=(4, 2, 1))
TOKENS = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(0))


def fused(layer: Attention) -> None:
    torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True).step()


def plain(layer: Attention) -> None:
    torch.optim.SGD(layer.parameters(), lr=0.1).step()


def written(layer: Attention) -> None:
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(2)


def loaded(layer: Attention) -> None:
    layer.load_state_dict({name: 2 * tensor for name, tensor in layer.state_dict().items()})


def moved(layer: Attention) -> None:
    layer.double().float()
    written(layer)


def replaced(layer: Attention) -> None:
    for name, parameter in list(layer.named_parameters()):
        owner, _, own = name.rpartition(".")
        setattr(layer.get_submodule(owner), own, nn.Parameter(parameter.detach() * 2))


@pytest.mark.parametrize("change", [fused, plain, written, loaded, moved, replaced])
def test_a_changed_layer_answers_as_a_copy_of_it_does(change: Callable[[Attention], None]) -> None:
    torch.manual_seed(0)
    layer = Attention(SPEC).eval().float()
    with torch.no_grad():
        before = layer(TOKENS.float())
        assert torch.equal(layer(TOKENS.float()), before)
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    change(layer)
    with torch.no_grad():
        after = layer(TOKENS.float())
        assert not torch.allclose(after, before)
        assert torch.equal(copy.deepcopy(layer)(TOKENS.float()), after)
