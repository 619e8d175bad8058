"""Policies in text, and what is left at every layer."""

import pytest

from attnrx.errors import InvalidInput
from attnrx.tokens import Random, TokenLayout, TokenPolicy, ToMe, parse_policy

VIT = TokenLayout(1, 196, True, "class")


def test_a_policy_in_text_is_stages_or_every_layer() -> None:
    staged = parse_policy(Random(), "0.7@4,7,10", VIT, 12)
    assert staged == TokenPolicy.staged(Random(), 0.7, (4, 7, 10))
    assert staged.counts(196) == (137, 96, 67)
    every = parse_policy(ToMe(), "16@every", VIT, 12)
    assert every.layers == tuple(range(2, 13))
    assert every.tokens(VIT, 12) == tuple(197 - 16 * layer for layer in range(12))


@pytest.mark.parametrize("patches", [16, 49, 196, 197, 1369])
def test_every_layer_loses_as_many(patches: int) -> None:
    for leaving in range(1, (patches - 1) // 11 + 1):
        counts = TokenPolicy.every_layer(ToMe(), leaving, patches, 12).counts(patches)
        assert counts == tuple(patches - leaving * stage for stage in range(1, 12))


@pytest.mark.parametrize(
    ("text", "said"),
    [("18@every", "1 to 17"), ("0.7@every", "not a share"), ("every", "RATIO@LAYER"), ("0.7@4,x", "RATIO@LAYER")],
)
def test_bad_text_is_refused(text: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        parse_policy(ToMe(), text, VIT, 12)
