"""Tables over seeds, on numbers that are known beforehand."""

from pathlib import Path

import pytest
from scipy import stats

from attnrx.config import to_dict
from attnrx.experiments import SvdaExperiment, SvdaRun, make_table
from attnrx.experiments.recipe import Column, Expected, Recipe, RecipeFile, Row

LOST = Column("lost", "lost", "refit", "accuracy_change", "pp", factor=-1.0)
KEPT = Column("kept", "kept", "refit", "accuracy", "%", decimals=None)
RECIPE = Recipe("a table", (Row("ten", "cifar10", "rho-0.90"),), (LOST, KEPT), (SvdaExperiment("cifar10"),))
FILE = RecipeFile(
    "paper/table",
    Path("table.py"),
    {"Paper": "A paper.", "Table": "3"},
    RECIPE,
    {"ten": {"lost": Expected(0.4, 0.3, "0.4 pp")}},
)


def run(seed: int, change: float) -> SvdaRun:
    measures = {"accuracy_change": {"value": change, "low": change - 1, "high": change + 2}}
    return SvdaRun(
        Path("nowhere"),
        {"settings": to_dict(SvdaExperiment("cifar10", seed=seed)), "rules": {"rho-0.90": {"refit": measures}}},
    )


def test_mean_deviation_and_interval_over_seeds():
    changes = [-0.5, -0.2, -0.8]
    cell = make_table(FILE, {"cifar10": [run(42 + i, change) for i, change in enumerate(changes)]}).cell("ten", "lost")
    assert cell is not None and cell.value == pytest.approx(0.5) and cell.deviation == pytest.approx(0.3)
    low, high = stats.t.interval(0.95, 2, loc=0.5, scale=stats.sem(changes))
    assert (cell.low, cell.high) == pytest.approx((low, high))
    assert cell.agrees


def test_one_seed_keeps_its_own_interval_turned_round_with_the_sign():
    cell = make_table(FILE, {"cifar10": [run(42, -0.8)]}).cell("ten", "lost")
    assert cell is not None and (cell.low, cell.value, cell.high) == pytest.approx((-1.2, 0.8, 1.8))
    assert cell.deviation is None and cell.agrees is False


def test_what_was_not_measured_is_missing_and_not_zero():
    table = make_table(FILE, {"cifar10": [run(42, -0.8)]}, ("4 epochs",))
    assert table.cell("ten", "kept") is None
    text = table.to_markdown()
    assert "| ten | 0.80 pp [\N{MINUS SIGN}1.20, 1.80] (0.4 pp) ! | \N{EN DASH} |".replace(" ", "") in text.replace(
        "\N{NO-BREAK SPACE}", ""
    ).replace(" ", "")
    assert "- 4 epochs" in text


def test_rows_without_runs_are_left_out(tmp_path: Path):
    table = make_table(FILE, {"cifar10": []})
    assert table.rows == () and table.cells == ()
    record, text = table.save(tmp_path)
    assert record == tmp_path / "paper" / "table.json" and text.exists()
