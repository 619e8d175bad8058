"""Cost tables of latency: those that no model can have are measured again, and only good ones are kept."""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from attnrx.decide.planning import measured_costs
from attnrx.decide.planning.cost_table import CostTable, exact_cost_table
from attnrx.decide.planning.measured_costs import ATTEMPTS, SLOWEST, STEADY, cached_cost_table
from attnrx.decide.planning.space import Space
from attnrx.support.errors import NotSupported
from attnrx.support.hardware import Load
from attnrx.support.storage import read_tensors, write_tensors
from support.planned import SETTINGS, spanned

Edit = Callable[[CostTable], CostTable]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # Not by ATTNRX_CACHE, where the C++ kernels would be built.
    monkeypatch.setattr(measured_costs, "cache_folder", lambda: tmp_path)
    monkeypatch.delenv("ATTNRX_MEASURE", raising=False)
    monkeypatch.setattr(Load, "taken", lambda load, threads: 0.0)
    return tmp_path


@pytest.fixture
def space() -> Space:
    return spanned()


def good(space: Space) -> CostTable:
    exact = exact_cost_table(space, "macs")
    # Of a timing, the MLP is a part of the attention's costs, and its own are savings.
    attention = exact.attention + exact.mlp[:, :1, :][:, None]
    return replace(exact, quantity="latency", attention=attention, mlp=exact.mlp - exact.mlp[:, :1])


def with_one(name: str, value: float) -> Edit:
    def edit(table: CostTable) -> CostTable:
        array = getattr(table, name).copy()
        array[(0,) + (-1,) * (array.ndim - 2) + (array.shape[-1] // 2,)] = value * table.whole
        return replace(table, **{name: array})

    return edit


BAD: dict[str, Edit] = {
    "negative": lambda table: replace(table, attention=-7.9 * table.attention),
    "one saving larger than the block": with_one("mlp", -0.9),
    "rising": with_one("attention", 9.0),
    "no number": with_one("mlp", np.nan),
    "negative stage": with_one("stages", -1.0),
    "no whole": lambda table: replace(table, whole=0.0),
}


def run(space: Space, tables: Iterator[CostTable]) -> tuple[CostTable, list[str]]:
    lines: list[str] = []
    return cached_cost_table(space, replace(SETTINGS, log=lines.append), lambda: next(tables)), lines


@pytest.mark.parametrize("kind", BAD)
def test_an_implausible_table_is_measured_again_and_not_kept(kind: str, space: Space, cache: Path) -> None:
    table = good(space)
    assert table.problem() is None and BAD[kind](table).problem() is not None
    with pytest.raises(NotSupported, match="cannot be measured here"):
        run(space, iter([BAD[kind](table)] * ATTEMPTS))
    assert not list(cache.rglob("*.safetensors"))
    found, lines = run(space, iter([BAD[kind](table), table]))
    assert found is table and any("measuring again" in line for line in lines)
    stored, _ = run(space, iter(()))
    assert np.array_equal(stored.attention, table.attention)


@pytest.mark.parametrize("kind", BAD)
def test_a_stored_table_that_is_implausible_is_measured_again(kind: str, space: Space, cache: Path) -> None:
    """As earlier versions kept them."""
    table = good(space)
    run(space, iter([table]))
    (path,) = cache.rglob("*.safetensors")
    tensors, bad = read_tensors(path), BAD[kind](table)
    del tensors["spread"]
    write_tensors(path, {name: torch.from_numpy(np.asarray(getattr(bad, name))) for name in tensors})
    found, lines = run(space, iter([table]))
    assert found is table and any("measured again" in line for line in lines)
    assert run(space, iter(()))[0].whole == table.whole


@pytest.mark.parametrize("damage", ["shape", "name", "type", "text"])
def test_a_damaged_table_is_measured_again(damage: str, space: Space, cache: Path) -> None:
    table = good(space)
    run(space, iter([table]))
    (path,) = cache.rglob("*.safetensors")
    tensors = read_tensors(path)
    if damage == "text":
        path.write_text("no tensors")
    else:
        changes = {
            "shape": {"mlp": tensors["mlp"][..., :-1]},
            "name": {"colour": tensors["whole"].clone()},
            "type": {"whole": tensors["attention"].clone()},
        }
        write_tensors(path, tensors | changes[damage])
    assert run(space, iter([table]))[0] is table


@pytest.mark.parametrize("noise", ["spread", "slower than the library"])
def test_noisy_timings_are_used_and_not_kept(noise: str, space: Space, cache: Path) -> None:
    table = good(space)
    noisy = replace(table, **{"spread": 2 * STEADY} if noise == "spread" else {"whole": table.whole / (1.1 * SLOWEST)})
    found, lines = run(space, iter([noisy, noisy]))  # a model that seems slow is measured twice
    assert found is noisy and any("not kept" in line for line in lines)
    assert any("measuring again" in line for line in lines) == (noise != "spread")
    assert not list(cache.rglob("*.safetensors"))


def test_a_table_of_a_busy_machine_is_used_with_a_warning_and_not_kept(
    space: Space, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Load, "taken", lambda load, threads: 1.5)
    table = good(space)
    found, lines = run(space, iter([table]))
    assert found is table and any("took 1.5 of the processors that it needs" in line for line in lines)
    assert not list(cache.rglob("*.safetensors"))


def test_an_old_table_is_measured_again_and_the_age_of_another_is_said(space: Space, cache: Path) -> None:
    run(space, iter([good(space)]))
    (path,) = cache.rglob("*.safetensors")
    for days, is_used in ((3, True), (measured_costs.OLDEST + 1, False)):
        then = time.time() - 86_400 * days
        os.utime(path, (then, then))
        _, lines = run(space, iter([good(space)]))
        assert any(f"{days} days old" in line for line in lines) == is_used


@pytest.mark.parametrize("change", ["edited", "renamed"])
def test_a_table_of_other_code_is_measured_again(
    change: str, space: Space, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version of attnrx is the same, and what was timed is not, e.g. the graph of an exported block."""
    package, file = tmp_path / "attnrx", "exporting/runtime_formats.py"
    shutil.copytree(measured_costs.PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(measured_costs, "PACKAGE", package)

    def table_of_now() -> CostTable:
        measured_costs.measured_code.cache_clear()
        return run(space, iter([good(space)]))[0]

    try:
        first = table_of_now()
        assert table_of_now().whole == first.whole and len(list(cache.glob("costs/*"))) == 1
        if change == "edited":
            with (package / file).open("a") as opened:
                opened.write("# a change\n")
        else:
            (package / file).rename(package / file.replace(".py", "_renamed.py"))
        table_of_now()
        assert len(list(cache.glob("costs/*"))) == 2
        (package / "workflows" / "shrink.py").write_text("# times nothing\n")
        measured_costs.measured_code.cache_clear()
        run(space, iter(()))  # nothing is measured
    finally:
        measured_costs.measured_code.cache_clear()
