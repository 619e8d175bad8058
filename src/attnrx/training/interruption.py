"""Ctrl-C and termination, answered at the end of a step instead of in the middle of one."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interruption:
    """Whether a signal to stop has arrived."""

    def __init__(self) -> None:
        self.wanted = False

    def ask(self, number: int, frame: FrameType | None) -> None:
        """Remembers the first signal; a second one stops at once, with what the last checkpoint holds."""
        if self.wanted:
            raise KeyboardInterrupt
        self.wanted = True


@contextmanager
def interruptible() -> Iterator[Interruption]:
    """Catches SIGINT and SIGTERM for a while; a signal that was not handled is raised at the end.

    Outside of the main thread, where signals cannot be caught, it changes nothing.
    """
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    before = {number: signal.signal(number, interruption.ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if interruption.wanted:
        raise KeyboardInterrupt
