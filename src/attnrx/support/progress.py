"""Progress of long calls: log callbacks, the phases of a call, and loops shown as lines."""

import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

Log = Callable[[str], None]
Item = TypeVar("Item")

# Seconds before a loop is shown at all, and between two lines: of a loop by itself, and of one in a phase.
DELAY, EVERY, EVERY_IN_PHASE = 2.0, 5.0, 15.0
# Seconds of silence after which a line is written in the middle of one step, and between two looks at the clock.
SILENCE, TICK = 14.0, 1.0
SETTING = "ATTNRX_PROGRESS"
# The loops that are most of their phases; in other phases every loop is.
MAIN_LOOPS = {
    "measuring sensitivities": "sensitivities",
    "searching plans": "searching plans",
    "realizing and repairing": "repairing blocks",
}
# The share of a call after which the time that is left is estimated.
KNOWN = 0.1


def no_log(_: str) -> None:
    """A log callback that discards the message."""


# The loops and calls that are shown now, the innermost at the end, and the thread that looks at the clock.
_working: "list[_Loop | Phases]" = []
_lock = threading.Lock()
_thread: threading.Thread | None = None


@contextmanager
def ticking(work: "_Loop | Phases") -> Iterator[None]:
    """Shows the work again whenever nothing was shown for SILENCE seconds, also during a step that takes long."""
    global _thread
    with _lock:
        _working.append(work)
        if _thread is None or not _thread.is_alive():  # the first work, or a process that was forked
            _thread = threading.Thread(target=_watch, name="attnrx progress", daemon=True)
            _thread.start()
    try:
        yield
    finally:
        with _lock:
            _working.remove(work)


def _watch() -> None:
    global _thread
    pause = threading.Event()
    while True:
        pause.wait(TICK)
        with _lock:
            if not _working:
                _thread = None  # the next work starts another
                return
        tick()


def tick() -> None:
    """Writes a line of the innermost work if no work was shown for SILENCE seconds."""
    now = time.monotonic()
    with _lock:
        work = list(_working)
    # A line of any of them shows that the process works.
    if work and now - max(each.shown for each in work) >= SILENCE:
        work[-1].shown = now
        if line := work[-1].line(now):
            _write(line)


class Phases:
    """The phases of a call in their order, each with its usual share of the time; which one runs, and how far it is.

    Shares are relative and only serve the estimate of the time left, which is corrected by the time of the phases that
    are done.
    """

    def __init__(self, shares: Iterable[tuple[str, float]], log: Log):
        self.steps, self.log = tuple(shares), log
        self.position, self.done, self.depth = -1, 0.0, 0
        self.skipped = 0.0
        self.start = self.shown = time.monotonic()
        self.loop = ""  # the innermost loop: its name and how many of its steps are done

    def begin(self, name: str) -> None:
        """Begins the next phase of this name; those in between are skipped, e.g. a diagnosis of an earlier call."""
        found = [index for index, step in enumerate(self.steps) if step[0] == name and index >= self.position]
        if not found or found[0] == self.position:  # another function's phase, or this one again
            return
        self.skipped += sum(share for _, share in self.steps[self.position + 1 : found[0]])
        self.position, self.done, self.shown = found[0], 0.0, time.monotonic()
        line = f"{self}{self._left()}"
        # Without a callback the phases are shown as loops are.
        if getattr(self.log, "__wrapped__", self.log) is no_log:
            _write(line)
        else:
            self.log(line)

    def advance(self, done: float) -> None:
        """States that this share of the phase is done, and shows it if nothing was shown for a while."""
        self.done = max(self.done, min(done, 1.0))
        now = time.monotonic()
        if now - self.shown >= EVERY_IN_PHASE:
            self.shown = now
            _write(self.line(now))

    def line(self, now: float) -> str:
        """Returns how far the phase and its innermost loop are, and the time that is left of the call."""
        del now
        if self.position < 0:
            return ""
        loop = f" ({self.loop})" if self.loop else ""
        return f"{self}, {100 * self.done:.0f} %{loop}{self._left()}"

    def counts(self, loop: str) -> bool:
        """Whether a loop of this name is the progress of the phase that runs."""
        return MAIN_LOOPS.get(self.steps[self.position][0], loop) == loop

    def __str__(self) -> str:
        return f"[{self.position + 1} of {len(self.steps)}] {self.steps[self.position][0]}"

    def _left(self) -> str:
        """Returns the time that is left of the whole call, as far as it can be known."""
        total = sum(share for _, share in self.steps) - self.skipped
        before = sum(share for _, share in self.steps[: self.position]) - self.skipped
        share = (before + self.done * self.steps[self.position][1]) / total
        if share < KNOWN:
            return ""
        seconds = (time.monotonic() - self.start) * (1 - share) / share
        return f"; about {duration(seconds)} left in all"


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
    found = Phases([(name, shares[name]) for name in (*once, *several)], log)
    token = _current.set(found)
    try:
        with ticking(found):
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
    """Yields the items, and shows how many are done and how long the others will take, if that is seconds.

    Inside a call with phases the outermost loop is the progress of its phase, and loops inside it only show that the
    call runs. Otherwise it is shown as lines on stderr. Set the environment variable ATTNRX_PROGRESS to 0 for none.
    """
    # A generator has no length; without one no remaining time can be given.
    total = len(items) if total is None and isinstance(items, Sized) else total
    current = _current.get()
    if current is not None and current.position >= 0:
        yield from _in_phase(items, what, current, total)
    else:
        loop = _Loop(what, total)
        with ticking(loop):
            for item in items:
                yield item
                loop.advance()


def _write(line: str) -> None:
    if os.environ.get(SETTING, "1") == "1":
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def _in_phase(items: Iterable[Item], what: str, current: Phases, total: int | None) -> Generator[Item]:
    # The loop that is the work of a phase, not one that prepares it.
    counts = not current.depth and current.counts(what)
    start, around = current.done, current.loop
    current.depth += 1
    try:
        for done, item in enumerate(items, 1):
            current.loop = f"{what}: {done - 1}{_of(total)}"
            yield item
            # The rest of the phase: it may have several loops after one another.
            share = done / total if counts and total else 0.0
            current.advance(start + (1 - start) * share if share else current.done)
    finally:
        current.depth -= 1
        current.loop = around


class _Loop:
    """A loop that is shown as lines."""

    def __init__(self, what: str, total: int | None):
        self.what, self.total, self.done = what, total, 0
        self.start = time.monotonic()
        # The first line may be written DELAY after the start, each further one EVERY after the last.
        self.shown = self.start + DELAY - EVERY

    def advance(self) -> None:
        """States that one more step is done, and shows it if nothing was shown for a while."""
        self.done += 1
        now = time.monotonic()
        if now - self.shown >= EVERY and self.done != self.total:  # no line for a loop that has ended
            self.shown = now
            _write(self.line(now))

    def line(self, now: float) -> str:
        seconds, left = now - self.start, ""
        if self.total is not None and self.done:
            left = f", about {duration(seconds / self.done * (self.total - self.done))} left"
        return f"{self.what}: {self.done}{_of(self.total)}, {duration(seconds)}{left}"


def _of(total: int | None) -> str:
    return "" if total is None else f" of {total}"
