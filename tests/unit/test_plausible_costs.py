"""Cost tables of latency: those that no model can have are measured again."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from attnrx.decide.planning.cost_table import CostTable, exact_cost_table
from attnrx.decide.planning.measured_costs import ATTEMPTS, plausible_table
from attnrx.decide.planning.space import Space
from attnrx.support.errors import NotSupported
from support.planned import spanned

Edit = Callable[[CostTable], CostTable]


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
    "rising": with_one("attention", 3.0),
    "no number": with_one("mlp", np.nan),
    "negative stage": with_one("stages", -1.0),
    "no whole": lambda table: replace(table, whole=0.0),
}


@pytest.mark.parametrize("kind", BAD)
def test_an_implausible_table_is_measured_again(kind: str, space: Space) -> None:
    table, lines = good(space), list[str]()
    assert table.problem() is None and BAD[kind](table).problem() is not None
    with pytest.raises(NotSupported, match="cannot be measured here"):
        plausible_table(iter([BAD[kind](table)] * ATTEMPTS).__next__, lines.append)
    assert plausible_table(iter([BAD[kind](table), table]).__next__, lines.append) is table
    assert any("measuring again" in line for line in lines)
