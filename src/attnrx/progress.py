"""The type of log callbacks: functions that take one line of text."""

from collections.abc import Callable

Log = Callable[[str], None]


def no_log(_: str) -> None:
    """A log callback that discards the message."""
