"""Progress messages: a function that takes them, one line each."""

from collections.abc import Callable

Log = Callable[[str], None]


def no_log(_: str) -> None:
    """Drops the message."""
