"""The phases of a call: their order, how far they are, and the time that is left of the whole."""

import re
from typing import Any

import pytest

import attnrx as rx
import cases
from attnrx.change.realization.repair import Repair
from attnrx.support import progress
from attnrx.support.progress import begin, passed_on, phases, track

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


def test_a_loop_in_a_loop_never_counts_backwards(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with phases(SHARES, [].append):
        begin("measuring")
        for _ in track(range(4), "outer"):
            for _ in track(range(5), "inner"):
                clock.now += 20.0
    shown = [int(percent) for percent in re.findall(r"measuring, (\d+) %", capsys.readouterr().err)]
    # A line for every step of 20 s: no silence of a minute.
    assert shown == sorted(shown) and len(shown) >= 20 and shown[-1] >= 75


def test_a_phase_of_another_call_is_not_shown_and_a_skipped_one_is_no_time(clock: Clock) -> None:
    lines: list[str] = []
    with phases(SHARES, lines.append), phases({"other": 1.0}, lines.append):
        begin("reading")
        begin("other")
        begin("reading")
        clock.now = 10.0
        begin("writing")
    assert lines == ["[1 of 3] reading", "[3 of 3] writing; about 10 s left in all"]


def test_repeated_phases_are_counted_for_every_result(clock: Clock) -> None:
    lines: list[str] = []
    with phases(SHARES, lines.append, repeated=2, again="measuring"):
        for name in ("reading", "measuring", "writing", "measuring", "writing"):
            begin(name)
    assert [line.partition(";")[0] for line in lines] == [
        "[1 of 5] reading", "[2 of 5] measuring", "[3 of 5] writing", "[4 of 5] measuring", "[5 of 5] writing"
    ]  # fmt: skip


def test_a_loop_of_another_process_is_the_progress_of_the_phase(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(progress.SETTING, "passed on")
    for _ in track(range(4), "blocks"):
        for _ in track(range(2), "latency"):
            clock.now += 6.0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 12 and not passed_on("cost table of an earlier plan")
    monkeypatch.setenv(progress.SETTING, "1")
    with phases(SHARES, [].append):
        begin("measuring")
        for line in lines:
            clock.now += 20.0
            assert passed_on(line)
    shown = [int(percent) for percent in re.findall(r"measuring, (\d+) %", capsys.readouterr().err)]
    assert shown == sorted(shown) and shown[-1] == 100


def test_the_log_of_a_call_has_its_phases_in_their_order() -> None:
    config = cases.CONFIGS["svda-deep"]
    lines: list[str] = []
    model, images = cases.model(config), cases.pixels(config, 60)
    result: Any = rx.shrink(model, images, macs=0.8, log=lines.append)
    found = [re.match(r"\[(\d+) of (\d+)\] ([\w ]+)", line) for line in lines]
    numbers = [int(match[1]) for match in found if match]
    assert numbers == sorted(numbers) == list(range(1, numbers[-1] + 1)), lines
    assert {match[2] for match in found if match} == {str(numbers[-1])}
    assert result.evidence.findings


def test_repair_shows_that_it_runs_inside_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    config = cases.CONFIGS["svda-deep"]
    model, images = cases.model(config), cases.pixels(config, 24)
    small = rx.realize(model, rx.prescribe(rx.diagnose(model, images), "qk=top_rank:2"))
    calls: list[float] = []
    monkeypatch.setattr(progress.Phases, "advance", lambda self, done: calls.append(done))
    with phases({"repairing": 1.0}, [].append):
        begin("repairing")
        rx.repair(small, model, images, Repair(steps=5))
    assert len(calls) > 3 * 2 * 5  # the steps of attention and MLP in every block
