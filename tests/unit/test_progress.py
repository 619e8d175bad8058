"""The phases of a call: their order, how far they are, and the time that is left of the whole."""

import re
import sys
from functools import wraps

import pytest

import attnrx as rx
from attnrx.cli.main import log
from attnrx.support import progress
from attnrx.support.progress import Log, begin, details, phases, say, time_range, track
from support.comparisons import pixels
from support.planned import CONFIG, original

SHARES = {"reading": 2.0, "measuring": 4.0, "fitting": 2.0, "writing": 2.0}
# Names of the code that mean nothing to a reader of the log.
INTERNAL = r"\b(own|qk|vo|fc1|fc2|None|trial|frontier)\b"


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def lines_at(clock: Clock, *times: float) -> list[str]:
    """The lines of the phases, which begin at these times."""
    lines: list[str] = []
    with phases(SHARES, lines.append):
        for name, now in zip(SHARES, times, strict=True):
            clock.now = now
            begin(name)
    return lines


def test_the_time_left_is_a_range_of_the_whole_and_shown_when_it_is_stable(clock: Clock) -> None:
    # Two estimates of the whole, 100 s and 110 s.
    assert lines_at(clock, 0.0, 20.0, 66.0, 85.0) == [
        "[1 of 4] reading",
        "[2 of 4] measuring",
        "[3 of 4] fitting; 10 to 70 s left",
        "[4 of 4] writing; at most 50 s left",
    ]
    clock.now = 0.0
    # 100 s, then 300 s: neither is shown.
    assert lines_at(clock, 0.0, 20.0, 180.0, 240.0)[2] == "[3 of 4] fitting"


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (31.0, 58.0, "30 to 60 s"),
        (-5.0, 3.0, "at most 10 s"),
        (100.0, 290.0, "2 to 5 min"),
        (20.0, 170.0, "at most 3 min"),
    ],
)
def test_a_range_has_one_unit(low: float, high: float, text: str) -> None:
    assert time_range(low, high) == text


def test_a_loop_in_a_log_is_a_line_a_minute(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    def lines_of(count: int) -> list[str]:
        for _ in track(range(count), "blocks"):
            for _ in track(range(4), "steps of a block"):
                clock.now += 3.0
        return capsys.readouterr().err.splitlines()

    with phases(SHARES, [].append):
        begin("measuring")
        assert lines_of(8) == ["[2 of 4] measuring, blocks: 5 of 8"]
    assert lines_of(8) == ["blocks: 5 of 8, about 36 s left"]


def test_a_phase_of_many_short_loops_is_a_line_a_minute(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    clock.now = 1.0
    with phases(SHARES, [].append):
        begin("measuring")
        for _ in range(24):  # 10 s each, so no loop would be shown on its own
            for _ in track(range(2), "files"):
                clock.now += 5.0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) in (3, 4) and set(lines) == {"[2 of 4] measuring, files: 1 of 2"}


@pytest.mark.parametrize("log", [say, wraps(say)(lambda _: None), wraps(log)(lambda _: None)])
def test_short_phases_are_no_lines_of_a_log(log: Log, clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with phases(SHARES, log):
        for name, now in zip(SHARES, (0.0, 4.0, 28.0, 44.0), strict=True):
            clock.now = now
            begin(name)
    assert [line.partition(";")[0] for line in capsys.readouterr().err.splitlines()] == [
        "[1 of 4] reading",
        "[3 of 4] fitting",
    ]


def test_a_terminal_has_one_line_that_overwrites_itself(
    clock: Clock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with phases(SHARES, say):
        begin("reading")
        for _ in track(range(10), "images"):
            clock.now += 1.0
        say("a fact")
        begin("measuring")
    written = capsys.readouterr().err
    assert written.count("\n") == 1 and "\r\x1b[Ka fact\n" in written
    assert "images: 3 of 10" in written and written.endswith("\r\x1b[K")  # nothing is left of it


def test_trials_are_details(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    details(lines.append)("a trial")
    monkeypatch.setenv("ATTNRX_PROGRESS", "2")
    details(lines.append)("another one")
    assert lines == ["another one"]


def test_a_call_writes_few_lines_without_internal_words(capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    images = [(batch.images, batch.labels) for batch in pixels(CONFIG, 48, 3).batches(8)]
    rx.shrink(original(), images, macs=0.8, log=lines.append)
    every = [*lines, *capsys.readouterr().err.splitlines()]
    assert 8 <= len(every) <= 16, every
    assert not [line for line in every if re.search(INTERNAL, line)]


def test_repeated_phases_are_counted_for_every_result(clock: Clock) -> None:
    lines: list[str] = []
    with phases({"reading": 1.0, "measuring": 2.0, "writing": 1.0}, lines.append, repeated=2, again="measuring"):
        for name in ("reading", "measuring", "writing", "measuring", "writing"):
            begin(name)
    assert [line.partition(";")[0] for line in lines] == [
        "[1 of 5] reading", "[2 of 5] measuring", "[3 of 5] writing", "[4 of 5] measuring", "[5 of 5] writing"
    ]  # fmt: skip
