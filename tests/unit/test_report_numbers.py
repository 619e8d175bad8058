"""Numbers in reports carry as many digits as they deserve."""

import math

import pytest

from attnrx.show.reports.numbers import MINUS, MISSING, TIMES, fixed, interval, number, percent, quantity


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (0, "0"),
        (3175690, "3,175,690"),
        (0.012345, "0.0123"),
        (99.96, "100"),
        (9.996, "10.0"),
        (-0.5, f"{MINUS}0.500"),
        (54321.7, "54,300"),
        (2.13e-6, f"2.13\N{NO-BREAK SPACE}{TIMES}\N{NO-BREAK SPACE}10⁻⁶"),
        (None, MISSING),
        (math.nan, MISSING),
        (math.inf, MISSING),
    ],
)
def test_a_number_has_three_significant_digits(value, written):
    assert number(value) == written


def test_rounding_to_zero_leaves_no_sign():
    assert fixed(-0.004, 2) == "0.00"
    assert fixed(-0.006, 2, signed=True) == f"{MINUS}0.01"


def test_the_interval_decides_the_decimals_of_its_value():
    assert quantity(-0.55555, "points", -2.0139, 0.8333) == f"{MINUS}0.6\N{NO-BREAK SPACE}points"
    assert interval(-2.0139, 0.8333) == f"[{MINUS}2.0, 0.8]"
    assert interval(0.01191, 0.01283) == "[0.01191, 0.01283]"
    assert interval(None, 0.3) == ""


def test_shares_are_percentages():
    assert percent(0.2308) == "23.1\N{NO-BREAK SPACE}%"
    assert percent(None) == MISSING
