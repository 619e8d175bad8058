"""Shows the progress of long calls, which consist of phases and loops.

On a terminal, all progress is shown in one line that overwrites itself. In a log, a phase writes a line when it
begins, unless the last line is less than BETWEEN_PHASES seconds old. A loop writes a line if the last line is at least
a minute old.
"""

import errno
import inspect
import os
import shutil
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

Log = Callable[[str], None]
Item = TypeVar("Item")

# Seconds before a loop is first shown, between two lines in a log, and between two updates on a terminal.
DELAY, EVERY, EVERY_LIVE = 2.0, 60.0, 0.5
BETWEEN_PHASES = 20.0  # the least number of seconds between the lines of two phases in a log
# The environment variable for progress: "0" shows nothing, "1" phases and loops, and "2" also every trial of a plan.
SETTING, SILENT, DETAILED = "ATTNRX_PROGRESS", "0", "2"
# The time left is shown after the share KNOWN of the call (by the usual shares of its phases), if the last two
# estimates of the whole time differ by at most the factor STABLE. The shown range covers both estimates, and is widened
# by the share UNCERTAIN on both sides.
KNOWN, STABLE, UNCERTAIN = 0.15, 1.5, 0.2

_is_live = False  # whether the last line on the terminal will be overwritten


def no_log(_: str) -> None:
    """Discards a message. This is the default log callback."""


def say(line: str) -> None:
    """Prints a message to stderr. This log callback first removes the line of progress from the terminal."""
    global _is_live
    start, _is_live = "\r\x1b[K" if _is_live else "", False
    _write(f"{start}{line}\n")


def details(log: Log) -> Log:
    """Returns the callback for details, e.g. every trial of a plan: `log` if ATTNRX_PROGRESS is 2, else `no_log`."""
    return log if os.environ.get(SETTING) == DETAILED else no_log


class Phases:
    """The phases of a call in order, each with its usual share of the call's time.

    The shares need not add up to 1. They are only used to estimate the time left from the time that the finished
    phases took.
    """

    def __init__(self, shares: Iterable[tuple[str, float]], log: Log):
        self.steps, self.log = tuple(shares), log
        self.position, self.skipped = -1, 0.0
        self.start, self.wholes = time.monotonic(), list[float]()
        self.shown: float | None = None  # the time of the last line

    def begin(self, name: str) -> None:
        """Begins the next phase of this name. Phases before it are skipped, e.g. a diagnosis that exists already."""
        found = [index for index, step in enumerate(self.steps) if step[0] == name and index >= self.position]
        if not found or found[0] == self.position:  # the phase belongs to another function, or has already begun
            return
        self.skipped += sum(share for _, share in self.steps[self.position + 1 : found[0]])
        self.position = found[0]
        total = sum(share for _, share in self.steps) - self.skipped
        done = (sum(share for _, share in self.steps[: self.position]) - self.skipped) / total
        if done >= KNOWN:
            self.wholes = [*self.wholes[-1:], (time.monotonic() - self.start) / done]
        line = f"{self}{self.left}"
        # A user's own callback gets every phase. Otherwise phases are shown like loops. `checked` and the command line
        # wrap callbacks, so the log is unwrapped here.
        now = time.monotonic()
        if inspect.unwrap(self.log) not in (no_log, say):
            self.shown = now
            self.log(line)
        elif _on_terminal() or self.shown is None or now - self.shown >= BETWEEN_PHASES:
            self.shown = now
            _show(line)

    @property
    def left(self) -> str:
        """The time left for the whole call as a text, e.g. "; 3 to 5 min left", or "" while the time is unknown."""
        if len(self.wholes) < 2 or max(self.wholes) > STABLE * min(self.wholes):
            return ""
        elapsed = time.monotonic() - self.start
        low, high = (1 - UNCERTAIN) * min(self.wholes) - elapsed, (1 + UNCERTAIN) * max(self.wholes) - elapsed
        return f"; {time_range(low, high)} left" if high > 0 else ""

    def __str__(self) -> str:
        return f"[{self.position + 1} of {len(self.steps)}] {self.steps[self.position][0]}"


_current: ContextVar[Phases | None] = ContextVar("phases", default=None)


@contextmanager
def phases(shares: Mapping[str, float], log: Log = no_log, repeated: int = 1, again: str = "") -> Iterator[None]:
    """Shows the phases of a call within the context. Only the outermost call shows its phases.

    `shares` maps every phase to its usual share of the call's time. If the call returns several results, pass their
    number as `repeated`. The phases from `again` on are then repeated for each result.
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
        _clear()


def begin(name: str) -> None:
    """Begins a phase of the running call. If the call has no phase of this name, nothing happens."""
    current = _current.get()
    if current is not None:
        current.begin(name)


def duration(seconds: float) -> str:
    """Returns a duration as text, in seconds if it is less than two minutes, and otherwise in minutes."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def time_range(low: float, high: float) -> str:
    """Returns a range of durations as text with one unit, e.g. "3 to 5 min" or "at most 40 s"."""
    unit, size = ("s", 10.0) if high < 120 else ("min", 60.0)
    scale = 1 if unit == "s" else 60
    first, last = (max(round(end / size) * size / scale, 0) for end in (low, high))
    last = max(last, size / scale)
    return f"{first:.0f} to {last:.0f} {unit}" if 0 < first < last else f"at most {last:.0f} {unit}"


def track(items: Iterable[Item], what: str, total: int | None = None) -> Generator[Item]:
    """Yields the items of a loop, and regularly shows on stderr how many are done.

    Within a phase of a call, the line also shows the time left for the whole call. Otherwise it shows the time left for
    the loop. To show nothing, set the environment variable ATTNRX_PROGRESS to 0.
    """
    # Without a length, e.g. of a generator, the time left is unknown.
    total = len(items) if total is None and isinstance(items, Sized) else total
    current = _current.get()
    phase = current if current is not None and current.position >= 0 else None
    every = EVERY_LIVE if _on_terminal() else EVERY
    start = time.monotonic()
    shown = start + DELAY - every
    if not _on_terminal():  # the time since the last line counts, because a phase may consist of many loops
        shown = start if phase is None else max(phase.shown or start, shown)
    for done, item in enumerate(items, 1):
        yield item
        now = time.monotonic()
        if now - shown >= every and done != total:  # a loop that has ended needs no line
            shown, count, left = now, f"{done}" if total is None else f"{done} of {total}", ""
            if phase is not None:
                phase.shown, left = now, phase.left
            elif total is not None:
                left = f", about {duration((now - start) / done * (total - done))} left"
            name = what if phase is None else str(phase)
            _show(f"{name if name.endswith(what) else f'{name}, {what}'}: {count}{left}")


def _on_terminal() -> bool:
    return sys.stderr.isatty()


def _show(line: str) -> None:
    """Writes a line of progress. On a terminal, the line overwrites the previous line."""
    global _is_live
    if os.environ.get(SETTING) == SILENT:
        return
    if _on_terminal():
        width = shutil.get_terminal_size().columns
        _write(f"\r\x1b[K{line[: max(width - 1, 20)]}")
        _is_live = True
    else:
        _write(f"{line}\n")


def _clear() -> None:
    """Removes the line of progress from a terminal."""
    global _is_live
    if _is_live:
        _write("\r\x1b[K")
        _is_live = False


def _write(text: str) -> None:
    """Writes to stderr. If the terminal was closed, nothing is written, because a signal will end this process."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError as error:
        if error.errno != errno.EIO:
            raise
