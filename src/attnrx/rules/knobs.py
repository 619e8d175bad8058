"""Range checks of knobs, with uniform error messages."""

import math

from attnrx.errors import InvalidRule
from attnrx.rules.rule import Rule, rule_name

MOST = 2**31 - 1


def require_share(rule: Rule, knob: str, value: float) -> None:
    """Raises InvalidRule unless the value is a share: a number in (0, 1]."""
    if not (_is_number(value) and 0 < value <= 1):
        raise InvalidRule(f"{_requested(rule, knob, value)}: {knob} is a share and must lie in (0, 1], e.g. 0.9.")


def require_positive(rule: Rule, knob: str, value: float) -> None:
    """Raises InvalidRule unless the value is a positive, finite number."""
    if not (_is_number(value) and 0 < value < math.inf):
        raise InvalidRule(
            f"{_requested(rule, knob, value)}: {knob} is compared with |strength| and must be a positive number."
        )


def require_count(rule: Rule, knob: str, value: int, least: int = 0) -> None:
    """Raises InvalidRule unless the value is an integer of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MOST:
        raise InvalidRule(f"{_requested(rule, knob, value)}: {knob} must be a whole number in {least}..{MOST}.")


def require_rank(rule: Rule, knob: str, value: int | float) -> None:
    """Raises InvalidRule unless the value is an integer number of directions or a share of them, a float in (0, 1]."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST
    if not is_count and not (isinstance(value, float) and 0 < value <= 1):
        raise InvalidRule(
            f"{_requested(rule, knob, value)}: give a whole number of directions, or a share in (0, 1], e.g. 0.5."
        )


def rank_among(value: int | float, total: int) -> int:
    """Returns the rank that a knob specifies: an integer itself, or a share of the `total` directions, at least one."""
    return value if isinstance(value, int) else max(1, round(value * total))


def require_rule(rule: Rule, value: object) -> None:
    """Raises InvalidRule unless the value is a rule that a control can match."""
    if not isinstance(value, Rule):
        name = rule_name(type(rule))
        raise InvalidRule(
            f"{name} was given {value!r}: give the rule that it matches, e.g. {name}(energy_retention:0.9)."
        )


def _requested(rule: Rule, knob: str, value: object) -> str:
    return f"{rule_name(type(rule))} was given {knob}={value!r}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
