"""A function in a process of its own: its value, what it says, its errors, and what cannot be sent."""

import os

import pytest

from attnrx.errors import NotSupported
from attnrx.planning import Target
from attnrx.runtime.subprocess_runner import run_in_subprocess

pytestmark = pytest.mark.slow


def test_the_value_comes_from_another_process() -> None:
    assert run_in_subprocess(divmod, 7, 2) == (3, 1)
    assert run_in_subprocess(os.getpid) != os.getpid()


def test_what_is_printed_is_heard() -> None:
    heard: list[str] = []
    run_in_subprocess(print, "one\ntwo", on_line=heard.append)
    assert heard == ["one", "two"]


def test_an_error_comes_back() -> None:
    with pytest.raises(NotSupported, match="choose from latency"):
        run_in_subprocess(Target.parse, "speed=2x")


def test_a_process_that_fails_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NotSupported, match="ended with code 1"):
        run_in_subprocess(divmod, 1, 0)
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_what_cannot_be_sent_is_named() -> None:
    with pytest.raises(NotSupported, match="cannot be pickled"):
        run_in_subprocess(len, lambda: None)
