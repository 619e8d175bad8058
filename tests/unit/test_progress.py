"""The phases of a call: their order, how far they are, and the time that is left of the whole."""

import re
import threading

import pytest

from attnrx.support import progress
from attnrx.support.progress import begin, phases, track

SHARES = {"reading": 1.0, "measuring": 2.0, "writing": 1.0}


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    monkeypatch.setattr(progress, "_thread", threading.main_thread())  # no other thread looks at this clock
    return clock


def test_phases_are_counted_with_the_time_that_is_left_of_the_call(clock: Clock) -> None:
    lines: list[str] = []
    with phases(SHARES, lines.append):
        begin("reading")
        clock.now = 10.0
        begin("measuring")
        clock.now = 30.0
        begin("writing")
    assert lines == ["[1 of 3] reading", "[2 of 3] measuring; about 30 s left in all",
                     "[3 of 3] writing; about 10 s left in all"]  # fmt: skip


def test_a_loop_in_a_loop_never_counts_backwards(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with phases(SHARES, [].append):
        begin("measuring")
        for _ in track(range(4), "outer"):
            for _ in track(range(5), "inner"):
                clock.now += 20.0
    shown = [int(percent) for percent in re.findall(r"measuring, (\d+) %", capsys.readouterr().err)]
    # A line for every step of 20 s: no silence of a minute.
    assert shown == sorted(shown) and len(shown) >= 20 and shown[-1] >= 75


def test_a_long_step_is_shown_every_fifteen_seconds(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """In a phase, in a loop of one and in a loop by itself: a line though no step of a loop is done."""

    def lines_of(seconds: int) -> list[str]:
        capsys.readouterr()
        for _ in range(seconds):
            clock.now += 1.0
            progress.tick()
        return capsys.readouterr().err.splitlines()

    with phases({"reading": 1.0, "repairing": 3.0}, [].append):
        assert not lines_of(40)  # before the first phase there is nothing to state
        begin("reading")
        assert len(lines_of(60)) == 4
        begin("repairing")
        for block in track(range(12), "repairing blocks"):
            shown = lines_of(30)
            assert len(shown) == 2 and f"repairing blocks: {block} of 12" in shown[-1] and "left in all" in shown[-1]
            if block == 2:
                break
    assert not lines_of(40)  # the call has ended
    shown: list[str] = []
    for done in track(range(12), "repairing blocks"):
        shown = lines_of(20)
        if done == 2:
            break
    assert shown == ["repairing blocks: 2 of 12, 54 s, about 4 min left"]


def test_repeated_phases_are_counted_for_every_result(clock: Clock) -> None:
    lines: list[str] = []
    with phases(SHARES, lines.append, repeated=2, again="measuring"):
        for name in ("reading", "measuring", "writing", "measuring", "writing"):
            begin(name)
    assert [line.partition(";")[0] for line in lines] == [
        "[1 of 5] reading", "[2 of 5] measuring", "[3 of 5] writing", "[4 of 5] measuring", "[5 of 5] writing"
    ]  # fmt: skip
