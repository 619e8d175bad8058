"""Policies that let as many patches leave before every layer."""

import pytest

from attnrx.errors import InvalidInput
from attnrx.tokens import TokenLayout, TokenPolicy, ToMe

VIT = TokenLayout(1, 196, True, "class")


def test_every_layer_sees_fewer_tokens() -> None:
    every = TokenPolicy(ToMe(), num_pruned=16).on(VIT, 12)
    assert every.layers == tuple(range(2, 13))
    assert every.tokens(VIT, 12) == tuple(197 - 16 * layer for layer in range(12))


@pytest.mark.parametrize("patches", [16, 49, 196, 197, 1369])
def test_every_layer_loses_as_many(patches: int) -> None:
    for num_pruned in range(1, (patches - 1) // 11 + 1):
        layout = TokenLayout(1, patches, True, "class")
        counts = TokenPolicy(ToMe(), num_pruned=num_pruned).on(layout, 12).counts(patches)
        assert counts == tuple(patches - num_pruned * stage for stage in range(1, 12))


@pytest.mark.parametrize(("num_pruned", "depth"), [(18, 12), (1, 1)])
def test_what_would_leave_nothing_is_refused(num_pruned: int, depth: int) -> None:
    with pytest.raises(InvalidInput, match="so that one remains"):
        TokenPolicy(ToMe(), num_pruned=num_pruned).on(VIT, depth)
