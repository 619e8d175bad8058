"""Checks as text: what is asked for is read, with knobs of the right kinds, and what cannot be read is said."""

import math
from collections.abc import Callable
from functools import partial

import pytest

from attnrx.show.checks import (
    CHECKS,
    Accuracy,
    Calibration,
    Check,
    Latency,
    Promises,
    all_checks,
    parse_checks,
    standard_checks,
)
from attnrx.support.errors import AttnrxError, InvalidInput
from attnrx_lab.checks import Robustness, Transfer
from support import cases
from support.comparisons import pixels


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
    assert checks == {name: all_checks()[name](**knobs) for name, knobs in read.items()}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "found 'the end'"),
        ("acuracy", "did you mean 'accuracy'"),
        ("accuracy,", "the name of a check"),
        ("accuracy costs", "',' and another check"),
        ("accuracy,accuracy", "given twice"),
        ("robustness(severity=3)", "did you mean 'severities'"),
        ("robustness(severities=2.5)", "severities of robustness is a whole number, not 2.5"),
        ("robustness(severities=3,severities=4)", "severities is given twice"),
        ("robustness(severities=)", "expected a whole number for severities"),
        ("robustness(severities=3", "')'"),
        ("costs(x=1)", "costs has no knobs"),
        ("transfer(training=x)", "unknown knob of transfer 'training'"),
        ("accuracy;costs", "cannot be read"),
    ],
)
def test_what_cannot_be_read_is_said(text: str, said: str) -> None:
    with pytest.raises(AttnrxError) as caught:
        parse_checks(text)
    assert said in str(caught.value)


@pytest.mark.parametrize("knob", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize(
    ("check", "name"),
    [
        (Accuracy, "most_drop"),
        (Calibration, "most_rise"),
        (Latency, "faster"),
        (Promises, "within"),
        (Robustness, "most_drop"),
        (partial(Transfer, pixels(cases.CONFIGS["dense"], 4), 3), "most_drop"),
    ],
)
def test_limits_are_finite_and_not_negative(check: Callable[..., Check], name: str, knob: float) -> None:
    """Evidence with another limit could be written, but not read."""
    with pytest.raises(InvalidInput, match=f"{name}={knob}.*0 or more"):
        check(**{name: knob})


def test_what_is_only_on_request_is_not_standard() -> None:
    assert {name for name, check in all_checks().items() if check.on_request} == {
        "controls",
        "features",
        "promises",
        "retrieval",
        "robustness",
        "transfer",
    }
    assert {check.name for check in standard_checks()} == {
        name for name, check in CHECKS.items() if not check.on_request
    }
