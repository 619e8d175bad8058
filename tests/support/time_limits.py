"""A limit on time, so that a case that hangs is reported as one."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raises TimeoutError in a block that takes longer; in the main thread only, as Python's signals."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"nothing happened for {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
