"""Signals that ask this process to stop, handled within a context."""

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

# Ctrl-C, the request of a scheduler or of `kill`, and a closed terminal (a signal that Windows does not have).
STOPPING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


@contextmanager
def handling(numbers: Iterable[int], handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Calls a function on these signals; the earlier handlers are restored at the end.

    Signals that this process ignores stay ignored: `nohup` relies on it. Has no effect outside the main thread, where
    Python refuses to install handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in numbers}
    before = {number: earlier for number, earlier in before.items() if earlier is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
