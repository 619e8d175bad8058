"""Policies as text: what is written is read back, and what cannot be read is said."""

from dataclasses import dataclass, field

import pytest

from attnrx.support.errors import AttnrxError, InvalidInput
from attnrx.support.records import to_dict
from attnrx.support.registry import Registry
from attnrx.vit import tokens
from attnrx.vit.tokens import REDUCERS, Reducer, TokenLayout, TokenPolicy, ToMe, parse_policy
from attnrx.vit.tokens import policy as policy_module
from attnrx_lab.tokens import Random, Spot
from support.cases import REDUCTIONS


@dataclass(frozen=True)
class Nested(ToMe):
    """A reducer with another for a knob."""

    name = "nested"
    scores: Reducer = field(default=Random())
    scale: float = 1.0
    how: str = "sum"


@dataclass(frozen=True)
class Mine(ToMe):
    scale: float = 1.0


POLICIES = [
    *(TokenPolicy.staged(reducer, 0.7, (4, 7, 10)) for reducer in REDUCTIONS.values()),
    TokenPolicy(Spot(), (4, 7), (0.8, 0.5)),
    TokenPolicy(Spot(), (4, 7), (0.8, 0.8)),
    TokenPolicy.staged(Spot(), 1 / 3, (2,)),
    TokenPolicy.staged(Spot(), 1.0, (2, 3)),
    TokenPolicy.staged(Nested(Spot(projected=0, variance=False), 0.1, "mean"), 0.9, (2, 12)),
    TokenPolicy.staged(Nested(Nested(Random(3))), 1e-3, (2, 12)),
    TokenPolicy(ToMe(), num_pruned=13),
    TokenPolicy(Nested(Spot(variance=False)), num_pruned=1),
]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_policy_survives_its_text(policy: TokenPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REDUCERS._things, "nested", Nested)
    assert parse_policy(str(policy)) == policy


@pytest.mark.parametrize(
    ("text", "spelled"),
    [
        ("evit:0.7@4,7,10", "evit:0.7@4,7,10"),
        (" spot( variance = false , projected=0 ) : .7 @ 4, 7 ", "spot(variance=false,projected=0):0.7@4,7"),
        ("class_attention:0.8/0.5@4,7", "class_attention:0.8/0.5@4,7"),
        ("spot(projected=none,mean=true):1@2", "spot:1.0@2"),
        ("random(seed=3):0.5/0.25@2,3", "random(seed=3):0.5@2,3"),
        ("tome : 13 @ every", "tome:13@every"),
    ],
)
def test_a_text_is_read(text: str, spelled: str) -> None:
    assert str(parse_policy(text)) == spelled


def test_a_policy_for_every_layer_is_written_alike_on_any_model() -> None:
    layout = TokenLayout(1, 196, class_token=True, pooled="class")
    written = parse_policy("tome:13@every")
    on_model = written.on(layout, 12)
    assert on_model.layers == tuple(range(2, 13))
    assert str(on_model) == str(written) and on_model.written == written != on_model
    assert on_model.tokens(layout, 12) == tuple(197 - 13 * layer for layer in range(12))
    assert written.drops and "13 of the image's patches" in written.describe()[0]


@pytest.mark.parametrize("patches", [16, 49, 196, 197, 1369])
def test_every_layer_loses_as_many(patches: int) -> None:
    for num_pruned in range(1, (patches - 1) // 11 + 1):
        layout = TokenLayout(1, patches, True, "class")
        counts = TokenPolicy(ToMe(), num_pruned=num_pruned).on(layout, 12).counts(patches)
        assert counts == tuple(patches - num_pruned * stage for stage in range(1, 12))


@pytest.mark.parametrize(
    ("num_pruned", "depth", "said"), [(18, 12, "1 to 17 patches per layer, so that one"), (1, 1, "at least two layers")]
)
def test_what_would_leave_nothing_is_refused(num_pruned: int, depth: int, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        TokenPolicy(ToMe(), num_pruned=num_pruned).on(TokenLayout(1, 196, True, "class"), depth)


def test_one_ratio_is_of_what_is_left_and_several_are_of_the_image() -> None:
    layout = TokenLayout(1, 196, class_token=True, pooled="class")
    assert parse_policy("evit:0.7@4,7,10").tokens(layout, 12) == (197,) * 3 + (139,) * 3 + (98,) * 3 + (69,) * 3
    assert parse_policy("class_attention:0.8/0.5@4,7").counts(196) == (156, 98)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the name of a token reducer"),
        ("spot", "':' and the keep ratio"),
        ("spot:0.7", "'@' and the layers"),
        ("spots:0.7@4", "did you mean 'spot'"),
        ("spot:0.7@7,4", "must increase"),
        ("spot:0.7@1", "stage needs a previous layer"),
        ("spot:0.5/0.7@4,7", "not increase"),
        ("spot:0.5/0.3@4", "one for each stage"),
        ("spot(mean=true,mean=true):0.7@4", "given twice"),
        ("spot(means=true):0.7@4", "did you mean 'mean'"),
        ("class_attention(seed=1):0.7@4", "class_attention has no knobs"),
        ("tome:0.7@every", "give one number before @every"),
        ("tome:13@every,4", "the end"),
        ("spot" + 60 * "(" + ":0.7@4", "brackets"),
    ],
)
def test_what_cannot_be_read_is_said(text: str, said: str) -> None:
    with pytest.raises(AttnrxError, match=said.replace("(", r"\(")):
        parse_policy(text)


def test_a_reducer_of_ones_own_has_a_name_after_it_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_module, "REDUCERS", Registry("token reducer", ToMe))
    with pytest.raises(AttnrxError, match="mine"):
        parse_policy("mine:0.7@4")
    policy_module.REDUCERS.register(Mine)
    policy = parse_policy("mine(scale=2.0):0.7@4")
    assert policy == TokenPolicy.staged(Mine(2.0), 0.7, (4,)) and str(policy) == "mine(scale=2.0):0.7@4"
    assert tokens.policy_from_dict(to_dict(policy)) == policy and "mine" not in REDUCERS
    with pytest.raises(InvalidInput, match="tome exists already"):
        policy_module.REDUCERS.register(Mine, "tome")
