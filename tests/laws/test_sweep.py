"""3,000 generated inputs to everything that a user touches: a right result, or an error of attnrx that says why not.

An input that failed is tried alone by its surface and number, `python -m support.sweep records 17` with the sources and
the tests on PYTHONPATH, which prints what it is.
"""

from collections.abc import Iterator
from pathlib import Path

import jaxtyping
import pytest
import torch

from attnrx.support.errors import InvalidInput
from support.sweep.case import Case, judged
from support.sweep.surfaces import SURFACES, tried

EVERY = [(surface, number) for surface, each in SURFACES.items() for number in range(each.count)]
FEW, PARTS = 22, 4  # every 22nd input is tried in `make test` too, in four tests; no process is started there


@pytest.fixture(autouse=True)
def as_for_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No type checks of arguments, the defaults of torch, a cache of the test, and no network."""
    jaxtyping.config.update("jaxtyping_disable", True)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def fault(surface: str, number: int, folder: Path) -> str | None:
    """What is wrong with the treatment of an input, with its name; None if nothing is."""
    (folder / "case").mkdir(parents=True)
    case, verdict = tried(surface, number, folder / "case")
    return verdict.fault and f"{surface} {number}, {case.name}: {verdict.fault}"


def test_there_are_3000_inputs_on_every_surface() -> None:
    assert len(EVERY) == 3000
    assert min(surface.count for surface in SURFACES.values()) >= 50


@pytest.mark.slow
@pytest.mark.parametrize(("surface", "number"), EVERY)
def test_an_input_is_used_or_refused(surface: str, number: int, tmp_path: Path) -> None:
    found = fault(surface, number, tmp_path)
    assert found is None, found


@pytest.mark.parametrize("part", range(PARTS))
def test_some_inputs_are_used_or_refused(part: int, tmp_path: Path) -> None:
    some = [each for each in EVERY[::FEW] if each[0] != "environment"][part::PARTS]
    found = [each for index, case in enumerate(some) if (each := fault(*case, tmp_path / str(index)))]
    assert not found, f"{len(found)} of {len(some)}:\n" + "\n".join(found)


def _leaving() -> None:
    Path("left").write_text("a")
    raise InvalidInput("path='a': give a path of another file.")


def _hanging() -> None:
    raise TimeoutError("nothing happened for 60 s")


FAULTS = {
    "from the depths": (lambda: {}["a"], "KeyError"),
    "a result of NaN": (lambda: [torch.tensor([0.0, float("nan")])], "not finite"),
    "a file that is left": (_leaving, "left"),
    "a hang": (_hanging, "TimeoutError"),
    "an exit": (lambda: exit(3), "SystemExit"),
    "other defaults": (lambda: torch.set_default_dtype(torch.float64), "defaults"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_the_law_finds_faults(name: str, tmp_path: Path) -> None:
    call, expected = FAULTS[name]
    found = judged(Case(name, call), tmp_path).fault
    assert found is not None and expected in found
