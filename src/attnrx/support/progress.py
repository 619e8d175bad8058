"""Progress of long calls: log callbacks, the phases of a call, and loops shown as a bar or as lines."""

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
# Starts the lines by which another process passes on how far it is (`subprocess_runner`).
PASSED_ON = "\0progress "
# The share of a call after which the time that is left is estimated.
KNOWN = 0.03


def no_log(_: str) -> None:
    """A log callback that discards the message."""


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
            _write(f"{self}, {100 * self.done:.0f} %{self._left()}")

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
_depth: ContextVar[int] = ContextVar("depth", default=0)  # of loops in a process that passes on its progress


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


def running() -> None:
    """Shows, in a call with phases, that it runs; for work inside a step of a loop that takes long."""
    current = _current.get()
    if current is not None and current.position >= 0:
        current.advance(current.done)


def passed_on(line: str) -> bool:
    """Takes a line of another process that states how far its loop is; returns whether it was one."""
    if not line.startswith(PASSED_ON):
        return False
    current = _current.get()
    done, total, what = line.removeprefix(PASSED_ON).split(" ", 2)
    if current is None or current.position < 0:
        if int(done):
            _write(f"{what}: {done}" + (f" of {total}" if int(total) else ""))
    else:
        current.advance(current.done if current.depth or not int(total) else int(done) / int(total))
    return True


def duration(seconds: float) -> str:
    """Returns a duration in seconds, or in minutes from two minutes on."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def track(items: Iterable[Item], what: str, total: int | None = None) -> Generator[Item]:
    """Yields the items, and shows how many are done and how long the others will take, if that is seconds.

    Inside a call with phases the outermost loop is the progress of its phase, and loops inside it only show that the
    call runs. Otherwise it is a bar in a terminal and in a notebook (with tqdm, if it is installed), else lines on
    stderr. Set the environment variable ATTNRX_PROGRESS to 0 for none.
    """
    # A generator has no length; without one no remaining time can be given.
    total = len(items) if total is None and isinstance(items, Sized) else total
    current, setting = _current.get(), os.environ.get(SETTING, "1")
    if current is not None and current.position >= 0:
        yield from _in_phase(items, current, total)
    elif setting == "0":
        yield from items
    elif setting == "passed on":
        yield from _passing_on(items, what, total)
    elif _draws_bars() and (bar := _bar(items, what, total)) is not None:
        yield from bar
    else:
        yield from _with_lines(items, what, total)


def _write(line: str) -> None:
    if os.environ.get(SETTING, "1") == "1":
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def _in_phase(items: Iterable[Item], current: Phases, total: int | None) -> Generator[Item]:
    is_outermost = not current.depth
    start = current.done
    current.depth += 1
    try:
        for done, item in enumerate(items, 1):
            yield item
            # The rest of the phase: it may have several loops after one another.
            share = done / total if is_outermost and total else 0.0
            current.advance(start + (1 - start) * share if share else current.done)
    finally:
        current.depth -= 1


def _passing_on(items: Iterable[Item], what: str, total: int | None) -> Generator[Item]:
    """Passes on how far the outermost loop is; a loop inside it only that it runs."""
    shown, depth = time.monotonic(), _depth.get()
    token = _depth.set(depth + 1)
    try:
        for done, item in enumerate(items, 1):
            yield item
            if time.monotonic() - shown >= EVERY:
                shown = time.monotonic()
                print(f"{PASSED_ON}{0 if depth else done} {0 if depth else total or 0} {what}", flush=True)  # noqa: T201
    finally:
        _depth.reset(token)


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
            left = "" if total is None else f" of {total}, about {duration((now - start) / done * (total - done))} left"
            _write(f"{what}: {done}{left}")
