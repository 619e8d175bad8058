"""The phases of a call: their order, how far they are, and the time that is left of the whole."""

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


def test_a_loop_is_shown_with_its_phase_and_the_time_that_is_left(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    def lines_of(count: int) -> list[str]:
        for _ in track(range(count), "blocks"):
            for _ in track(range(4), "steps of a block"):  # less than 15 s: the outer loop is shown alone
                clock.now += 3.0
        return capsys.readouterr().err.splitlines()

    with phases(SHARES, [].append):
        begin("measuring")
        assert lines_of(4) == ["[2 of 3] measuring, blocks: 2 of 4, 24 s, about 24 s left"]
    assert "blocks: 2 of 4, 24 s, about 24 s left" in lines_of(4)


def test_repeated_phases_are_counted_for_every_result(clock: Clock) -> None:
    lines: list[str] = []
    with phases(SHARES, lines.append, repeated=2, again="measuring"):
        for name in ("reading", "measuring", "writing", "measuring", "writing"):
            begin(name)
    assert [line.partition(";")[0] for line in lines] == [
        "[1 of 5] reading", "[2 of 5] measuring", "[3 of 5] writing", "[4 of 5] measuring", "[5 of 5] writing"
    ]  # fmt: skip
