"""Shows the progress of long calls, with log callbacks, the phases of a call, and loops.

On a terminal, phases and loops are shown in one line that overwrites itself. In a log, a phase is a line if it begins
some seconds after the last line of a phase, and a loop is a line every minute.
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

# Seconds before a loop is first shown, between two lines of a loop in a log, and between two updates on a terminal.
DELAY, EVERY, EVERY_LIVE = 2.0, 60.0, 0.5
BETWEEN_PHASES = 20.0  # seconds from the line of a phase to the next one in a log
# With "0" no progress is shown, with "1" phases and loops, and with "2" also every trial of a plan.
SETTING, SILENT, DETAILED = "ATTNRX_PROGRESS", "0", "2"
# The time left is shown once the share KNOWN of the call is done (by the usual shares of its phases), and the last two
# estimates of the whole time differ by at most the factor STABLE. It is the range of these estimates, widened by the
# share UNCERTAIN to both sides.
KNOWN, STABLE, UNCERTAIN = 0.15, 1.5, 0.2

_is_live = False  # whether the last line on the terminal will be overwritten


def no_log(_: str) -> None:
    """A log callback that discards the message."""


def say(line: str) -> None:
    """A log callback that prints a line to stderr, above the line that overwrites itself."""
    global _is_live
    start, _is_live = "\r\x1b[K" if _is_live else "", False
    _write(f"{start}{line}\n")


def details(log: Log) -> Log:
    """Returns a log for lines that only developers need, e.g. every trial of a plan. Without `--debug` it is silent."""
    return log if os.environ.get(SETTING) == DETAILED else no_log


class Phases:
    """The phases of a call in order, each with its usual share of the time.

    Shares are relative. They are only used to estimate the time left, together with the time of finished phases.
    """

    def __init__(self, shares: Iterable[tuple[str, float]], log: Log):
        self.steps, self.log = tuple(shares), log
        self.position, self.skipped = -1, 0.0
        self.start, self.wholes = time.monotonic(), list[float]()
        self.shown: float | None = None  # the time of the last line for a phase

    def begin(self, name: str) -> None:
        """Begins the next phase of this name. Phases before it are skipped, e.g. a diagnosis that exists already."""
        found = [index for index, step in enumerate(self.steps) if step[0] == name and index >= self.position]
        if not found or found[0] == self.position:  # a phase of another function, or the present phase
            return
        self.skipped += sum(share for _, share in self.steps[self.position + 1 : found[0]])
        self.position = found[0]
        total = sum(share for _, share in self.steps) - self.skipped
        done = (sum(share for _, share in self.steps[: self.position]) - self.skipped) / total
        if done >= KNOWN:
            self.wholes = [*self.wholes[-1:], (time.monotonic() - self.start) / done]
        line = f"{self}{self.left}"
        # Without the user's own callback, phases are shown like loops.
        if inspect.unwrap(self.log) in (no_log, say):  # the command line and the checks of arguments wrap callbacks
            now = time.monotonic()
            if _on_terminal() or self.shown is None or now - self.shown >= BETWEEN_PHASES:
                self.shown = now
                _show(line)
        else:
            self.log(line)

    @property
    def left(self) -> str:
        """The time left for the whole call, as the text of a range. It is empty while the time is unknown."""
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
    """Shows the phases of a call. Within another call it has no effect, because the other call's phases are shown.

    The phases from `again` on are repeated for each of `repeated` results.
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
    """Begins a phase of the running call, if this call has a phase of this name."""
    current = _current.get()
    if current is not None:
        current.begin(name)


def duration(seconds: float) -> str:
    """Returns a duration as text, in seconds below two minutes, and otherwise in minutes."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def time_range(low: float, high: float) -> str:
    """Returns a range of durations as text with one unit, e.g. "3 to 5 min" or "at most 40 s"."""
    unit, size = ("s", 10.0) if high < 120 else ("min", 60.0)
    scale = 1 if unit == "s" else 60
    first, last = (max(round(end / size) * size / scale, 0) for end in (low, high))
    last = max(last, size / scale)
    return f"{first:.0f} to {last:.0f} {unit}" if 0 < first < last else f"at most {last:.0f} {unit}"


def track(items: Iterable[Item], what: str, total: int | None = None) -> Generator[Item]:
    """Yields the items, and regularly shows on stderr how many are done.

    Within a phase of a call, it also shows the time left for the whole call. Otherwise it shows the time left for the
    items. To show nothing, set the environment variable ATTNRX_PROGRESS to 0.
    """
    # A generator has no length, and without a length the time left is unknown.
    total = len(items) if total is None and isinstance(items, Sized) else total
    current = _current.get()
    phase = current if current is not None and current.position >= 0 else None
    every = EVERY_LIVE if _on_terminal() else EVERY
    start = time.monotonic()
    # The first line may be written DELAY seconds after the start on a terminal, and EVERY seconds after it in a log.
    shown = start + DELAY - EVERY_LIVE if _on_terminal() else start
    for done, item in enumerate(items, 1):
        yield item
        now = time.monotonic()
        if now - shown >= every and done != total:  # a loop that has ended needs no line
            shown, count, left = now, f"{done}" if total is None else f"{done} of {total}", ""
            if phase is not None:
                left = phase.left
            elif total is not None:
                left = f", about {duration((now - start) / done * (total - done))} left"
            name = what if phase is None else str(phase)
            _show(f"{name if name.endswith(what) else f'{name}, {what}'}: {count}{left}")


def _on_terminal() -> bool:
    return sys.stderr.isatty()


def _show(line: str) -> None:
    """Writes a line of progress. On a terminal, the line overwrites the last one."""
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
    """Writes to stderr. If the terminal is closed, nothing is written, because a signal will follow."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError as error:
        if error.errno != errno.EIO:
            raise
