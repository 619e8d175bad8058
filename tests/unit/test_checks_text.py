"""Checks as text: what is asked for is read, with knobs of the right kinds, and what cannot be read is said."""

import pytest

from attnrx.show.checks import CHECKS, parse_checks
from attnrx.support.errors import AttnrxError


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("accuracy", {"accuracy": {}}),
        ("accuracy, costs", {"accuracy": {}, "costs": {}}),
        ("accuracy(most_drop=2),fidelity", {"accuracy": {"most_drop": 2.0}, "fidelity": {}}),
        ("accuracy(most_drop=none)", {"accuracy": {"most_drop": None}}),
        (
            "robustness( severities = 1/3 , corruptions=fog/extra, images=none )",
            {"robustness": {"severities": (1, 3), "corruptions": ("fog", "extra"), "images": None}},
        ),
        (
            "transfer(per_class=50,seeds=7,learning_rate=1e-3)",
            {"transfer": {"per_class": 50, "seeds": (7,), "learning_rate": 1e-3}},
        ),
    ],
)
def test_a_text_is_read(text: str, read: dict) -> None:
    checks = {check.name: check for check in parse_checks(text)}
    assert checks == {name: CHECKS[name](**knobs) for name, knobs in read.items()}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("acuracy", "did you mean 'accuracy'"),
        ("accuracy,", "the name of a check"),
        ("accuracy,accuracy", "given twice"),
        ("robustness(severity=3)", "did you mean 'severities'"),
        ("robustness(severities=2.5)", "severities of robustness is a whole number, not 2.5"),
        ("robustness(severities=3", "')'"),
        ("costs(x=1)", "costs has no knobs"),
        ("transfer(training=x)", "unknown knob of transfer 'training'"),
    ],
)
def test_what_cannot_be_read_is_said(text: str, said: str) -> None:
    with pytest.raises(AttnrxError) as caught:
        parse_checks(text)
    assert said in str(caught.value)
