"""Handles Ctrl-C and termination at the end of a step instead of within one."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interruption:
    """Whether a signal to stop was received."""

    def __init__(self) -> None:
        self.wanted = False

    def ask(self, number: int, frame: FrameType | None) -> None:
        """Records the first signal; a second one raises KeyboardInterrupt immediately, without a new checkpoint."""
        if self.wanted:
            raise KeyboardInterrupt
        self.wanted = True


@contextmanager
def interruptible() -> Iterator[Interruption]:
    """Handles SIGINT and SIGTERM inside the context; a pending signal raises KeyboardInterrupt at the end.

    Has no effect outside the main thread, where signals cannot be handled.
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
