"""Progress of long calls: log callbacks, the phases of a call, and loops shown as lines."""

import os
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

Log = Callable[[str], None]
Item = TypeVar("Item")

# Seconds before a loop is shown at all, and between two lines: of a loop by itself, and of one in a phase.
DELAY, EVERY, EVERY_IN_PHASE = 2.0, 5.0, 15.0
SETTING = "ATTNRX_PROGRESS"
# The share of a call after which the time that is left is estimated.
KNOWN = 0.1


def no_log(_: str) -> None:
    """A log callback that discards the message."""


class Phases:
    """The phases of a call in their order, each with its usual share of the time.

    Shares are relative and only serve the estimate of the time left, which is corrected by the time of the phases that
    are done.
    """

    def __init__(self, shares: Iterable[tuple[str, float]], log: Log):
        self.steps, self.log = tuple(shares), log
        self.position, self.skipped = -1, 0.0
        self.start = time.monotonic()

    def begin(self, name: str) -> None:
        """Begins the next phase of this name; those in between are skipped, e.g. a diagnosis of an earlier call."""
        found = [index for index, step in enumerate(self.steps) if step[0] == name and index >= self.position]
        if not found or found[0] == self.position:  # another function's phase, or this one again
            return
        self.skipped += sum(share for _, share in self.steps[self.position + 1 : found[0]])
        self.position = found[0]
        total = sum(share for _, share in self.steps) - self.skipped
        share = (sum(share for _, share in self.steps[: self.position]) - self.skipped) / total
        line = str(self)
        if share >= KNOWN:
            line += f"; about {duration((time.monotonic() - self.start) * (1 - share) / share)} left in all"
        # Without a callback the phases are shown as loops are.
        if getattr(self.log, "__wrapped__", self.log) is no_log:
            _write(line)
        else:
            self.log(line)

    def __str__(self) -> str:
        return f"[{self.position + 1} of {len(self.steps)}] {self.steps[self.position][0]}"


_current: ContextVar[Phases | None] = ContextVar("phases", default=None)


@contextmanager
def phases(shares: Mapping[str, float], log: Log = no_log, repeated: int = 1, again: str = "") -> Iterator[None]:
    """Shows the phases of a call. Inside another call it has no effect: that call's phases are shown.

    From the phase `again` on, they are repeated for each of `repeated` results.
    """
    if _current.get() is not None:
        yield
        return
    names = list(shares)
    once = names[: names.index(again)] if again else names
    several = names[len(once) :] * repeated
    token = _current.set(Phases([(name, shares[name]) for name in (*once, *several)], log))
    try:
        yield
    finally:
        _current.reset(token)


def begin(name: str) -> None:
    """Begins a phase of the call that is running, if it has a phase of this name."""
    current = _current.get()
    if current is not None:
        current.begin(name)


def duration(seconds: float) -> str:
    """Returns a duration in seconds, or in minutes from two minutes on."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def track(items: Iterable[Item], what: str, total: int | None = None) -> Generator[Item]:
    """Yields the items, and shows now and then as a line on stderr how many are done and how long the others will take.

    Set the environment variable ATTNRX_PROGRESS to 0 for none.
    """
    # A generator has no length; without one no remaining time can be given.
    total = len(items) if total is None and isinstance(items, Sized) else total
    current = _current.get()
    in_phase = current is not None and current.position >= 0
    every, prefix = (EVERY_IN_PHASE, f"{current}, ") if in_phase else (EVERY, "")
    start = time.monotonic()
    # The first line may be written DELAY after the start, each further one `every` after the last.
    shown = start if in_phase else start + DELAY - EVERY
    for done, item in enumerate(items, 1):
        yield item
        now = time.monotonic()
        if now - shown >= every and done != total:  # no line for a loop that has ended
            shown, count, left = now, f"{done}", ""
            if total is not None:
                count = f"{done} of {total}"
                left = f", about {duration((now - start) / done * (total - done))} left"
            _write(f"{prefix}{what}: {count}, {duration(now - start)}{left}")


def _write(line: str) -> None:
    if os.environ.get(SETTING, "1") == "1":
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
