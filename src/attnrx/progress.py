"""Progress of long calls: log callbacks, and loops shown as a bar or as lines."""

import os
import sys
import time
from collections.abc import Callable, Generator, Iterable, Sized
from typing import TypeVar

Log = Callable[[str], None]
Item = TypeVar("Item")

# Seconds before a loop is shown at all, and between two lines.
DELAY, EVERY = 2.0, 5.0
SETTING = "ATTNRX_PROGRESS"


def no_log(_: str) -> None:
    """A log callback that discards the message."""


def track(items: Iterable[Item], what: str, total: int | None = None) -> Generator[Item]:
    """Yields the items, and shows how many are done and how long the others will take, if that is seconds.

    In a terminal and in a notebook it is a bar (with tqdm, if it is installed), otherwise lines on stderr. Set the
    environment variable ATTNRX_PROGRESS to 0 for none.
    """
    # A generator has no length; without one no remaining time can be given.
    total = len(items) if total is None and isinstance(items, Sized) else total
    if os.environ.get(SETTING, "1") == "0":
        yield from items
    elif _draws_bars() and (bar := _bar(items, what, total)) is not None:
        yield from bar
    else:
        yield from _with_lines(items, what, total)


def _draws_bars() -> bool:
    return sys.stderr.isatty() or "ipykernel" in sys.modules


def _bar(items: Iterable[Item], what: str, total: int | None) -> Iterable[Item] | None:
    try:
        from tqdm.auto import tqdm  # here, because it is optional
    except ImportError:
        return None
    return tqdm(items, desc=what, total=total, delay=DELAY, leave=False)


def _with_lines(items: Iterable[Item], what: str, total: int | None) -> Generator[Item]:
    start = time.monotonic()
    # The first line may be printed DELAY after the start, each further one EVERY after the last.
    shown = start + DELAY - EVERY
    for done, item in enumerate(items, 1):
        yield item
        now = time.monotonic()
        if now - shown >= EVERY and done != total:  # no line for a loop that has ended
            shown = now
            left = "" if total is None else f" of {total}, about {(now - start) / done * (total - done):.0f} s left"
            sys.stderr.write(f"{what}: {done}{left}\n")
            sys.stderr.flush()
