"""Handles signals that ask this process to stop, within a context."""

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

# These signals mean Ctrl-C, a request by a scheduler or `kill`, and a closed terminal (which Windows does not have).
STOPPING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


@contextmanager
def handling(numbers: Iterable[int], handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Calls a function on these signals, and restores the earlier handlers at the end.

    Signals that this process ignores stay ignored, because `nohup` relies on that. Outside the main thread, Python
    refuses to install handlers, so the context has no effect there.
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
