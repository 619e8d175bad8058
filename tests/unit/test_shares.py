"""A share may be written in percent wherever it is read: 50% is 0.5."""

from argparse import ArgumentTypeError

import pytest

from attnrx.cli.options import parse_losses
from attnrx.decide.rules import parse_rule
from attnrx.nouns.target import Target
from attnrx.support.errors import InvalidInput
from attnrx.vit.tokens import parse_policy
from attnrx_lab.commands.methods import SHARES


@pytest.mark.parametrize("kind", ["latency", "macs", "params"])
def test_targets(kind: str) -> None:
    assert Target.parse(f"{kind}=50%") == Target.parse(f"{kind}=0.5x") == Target(kind, 0.5)
    with pytest.raises(InvalidInput, match="wrong unit"):
        Target.parse("max-drop=1%")
    with pytest.raises(InvalidInput, match="below 1"):
        Target.parse(f"{kind}=150%")


def test_rules_and_policies() -> None:
    assert parse_rule("total_rank:50%") == parse_rule("total_rank:0.5")
    assert parse_rule("energy_retention:rho=90%") == parse_rule("energy_retention:0.90")
    assert parse_policy("evit:70%@4") == parse_policy("evit:0.7@4")
    for text in ("top_rank:50%", "total_rank:50%%", "total_rank:%"):
        with pytest.raises(InvalidInput):
            parse_rule(text)


def test_options() -> None:
    assert SHARES("90%,0.5") == (0.9, 0.5)
    assert parse_losses(("keep_ratio:20%",), {}, True) == parse_losses(("keep_ratio:0.2",), {}, True)
    with pytest.raises(ArgumentTypeError, match="with commas between them"):
        SHARES("90%%")
