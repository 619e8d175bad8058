"""Handlers for signals that ask this process to stop."""

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

# Ctrl-C sends SIGINT, a scheduler or `kill` sends SIGTERM, and a closed terminal sends SIGHUP (not on Windows).
STOPPING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


@contextmanager
def handling(numbers: Iterable[int], handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Calls `handler` on the signals `numbers` within the context, and restores the earlier handlers at the end.

    Signals that this process already ignores stay ignored, because `nohup` relies on that. Outside the main thread,
    Python does not allow new handlers, so the context has no effect.
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
