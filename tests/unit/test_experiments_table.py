"""Tables over seeds, on numbers that are known beforehand, and their comparison with the paper's."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scipy import stats

import attnrx_lab.papers
from attnrx.cli.main import main
from attnrx.support.errors import InvalidInput
from attnrx_lab.papers import ReproducedTable, Run, load_recipe, make_table
from attnrx_lab.papers.recipe import Column, Expected, Recipe, Row
from attnrx_lab.papers.svda import SvdaExperiment
from attnrx_lab.papers.table import crossed_interval

LOST = Column("lost", "lost", "refit", "accuracy_change", "pp", factor=-1.0)
KEPT = Column("kept", "kept", "refit", "accuracy", "%", decimals=None)
RECIPE = Recipe(
    "a table",
    (Row("ten", "cifar10", "rho-0.90"),),
    (LOST, KEPT),
    (SvdaExperiment("cifar10"),),
    table="3",
    not_stated="the optimizer",
    name="paper/table",
    paper="A paper.",
    expected={"ten": {"lost": Expected.of("0.4 pp")}},
    states_seeds=True,
)


def run(seed: int, change: float, notes: Sequence[str] = ()) -> Run:
    measures = {"accuracy_change": {"value": change, "low": change - 1, "high": change + 2}}
    record = {"rules": {"rho-0.90": {"refit": measures}}, "data": {"notes": list(notes), "images": 1234}}
    return Run(Path("nowhere"), record, SvdaExperiment("cifar10", seed=seed))


def table(changes: Sequence[float], **options: object) -> ReproducedTable:
    runs = [run(42 + index, change) for index, change in enumerate(changes)]
    return make_table(RECIPE, runs, **options)  # type: ignore[arg-type]


def test_mean_deviation_and_interval_over_seeds():
    changes = [-0.5, -0.2, -0.8]
    cell = table(changes).cell("ten", "lost")
    assert cell is not None and cell.value == pytest.approx(0.5) and cell.deviation == pytest.approx(0.3)
    low, high = stats.t.interval(0.95, 2, loc=0.5, scale=stats.sem(changes))
    assert (cell.low, cell.high) == pytest.approx((low, high))
    # The mean of three further seeds varies as much as ours.
    half = stats.t.ppf(0.975, 2) * 0.3 * (1 / 3 + 1 / 3) ** 0.5
    assert cell.predicted == pytest.approx((0.5 - half, 0.5 + half))


def test_one_seed_keeps_its_own_interval_turned_round_with_the_sign():
    cell = table([-0.8]).cell("ten", "lost")
    assert cell is not None and (cell.low, cell.value, cell.high) == pytest.approx((-1.2, 0.8, 1.8))
    assert cell.deviation is None and cell.predicted is None


def test_numbers_of_a_paper_without_seeds_are_those_of_one_run():
    """A single further run varies more than the mean of three."""
    runs = [run(42 + index, change) for index, change in enumerate([-0.5, -0.2, -0.8])]
    widths = []
    for states_seeds in (True, False):
        cell = make_table(replace(RECIPE, states_seeds=states_seeds), runs).cell("ten", "lost")
        assert cell is not None and cell.predicted is not None
        widths.append(cell.predicted[1] - cell.predicted[0])
    assert widths[1] / widths[0] == pytest.approx((4 / 2) ** 0.5)  # sqrt(1 + 3/1) and sqrt(1 + 3/3)


@pytest.mark.parametrize(("change", "verdict"), [(-0.4, "agrees"), (-0.44, "agrees"), (-0.8, "undecided")])
def test_one_seed_is_never_off(change: float, verdict: str):
    """Its interval is over images and says nothing about other seeds, which the paper's number is from."""
    cell = table([change]).cell("ten", "lost")
    assert cell is not None and cell.verdict == verdict


def test_the_caption_has_the_seeds_and_images_that_were_used():
    found = table([-0.4, -0.5])
    assert "- cifar10: n = 1,234 test images, seeds 42, 43\n" in found.to_markdown()
    record = found.to_records()
    assert record["samples"] == {"cifar10": {"seeds": [42, 43], "images": 1234}}
    assert [cell["images"] for cell in record["cells"]] == [1234]


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ([-0.4, -0.41, -0.39], "agrees"),
        ([-0.449, -0.449, -0.449], "agrees"),  # rounds to 0.4
        ([-0.46, -0.46, -0.46], "off"),
        ([-0.34, -0.34, -0.34], "off"),
        ([0.0, 0.0, 0.0], "off"),
        ([0.4, 0.4, 0.4], "off"),
        ([-0.9, 0.1, -0.4], "undecided"),  # the interval includes no effect, too
    ],
)
def test_verdict_follows_from_the_printed_digit_and_the_seeds(changes: list[float], verdict: str):
    cell = table(changes).cell("ten", "lost")
    assert cell is not None and cell.verdict == verdict


def test_a_row_with_another_protocol_is_not_compared():
    found = table([-0.4, -0.4, -0.4], deviations={"cifar10": ["4 epochs"]})
    assert found.verdicts == {"agrees": 0, "off": 0, "undecided": 0, "not at protocol": 1}
    assert "(0.4 pp) ~" in found.to_markdown() and "- 4 epochs" in found.to_markdown()


@pytest.mark.parametrize(("same_shapes", "verdict"), [(True, "off"), (False, "not at protocol")])
def test_exact_quantities_are_compared_at_any_protocol_of_the_same_shapes(same_shapes: bool, verdict: str):
    column = Column("lost", "lost", "refit", "accuracy_change", "%", exact=True)
    recipe = replace(RECIPE, columns=(column,), expected={"ten": {"lost": Expected.of("49.7")}})
    made = make_table(recipe, [run(42, 49.6)], {"cifar10": ["4 epochs"]}, same_shapes)
    cell = made.cell("ten", "lost")
    assert cell is not None and cell.verdict == verdict


def test_what_was_not_measured_is_missing_and_not_zero():
    found = make_table(RECIPE, [run(42, -0.9, ["a copy"])])
    assert found.cell("ten", "kept") is None
    text = found.to_markdown()
    assert "| ten | 0.90 pp [\N{MINUS SIGN}1.10, 1.90] (0.4 pp) ? | \N{EN DASH} |".replace(" ", "") in text.replace(
        "\N{NO-BREAK SPACE}", ""
    ).replace(" ", "")
    assert "- cifar10: a copy" in text and "chosen here: the optimizer" in text
    assert "Numbers of the paper: 0 agrees, 0 off, 1 undecided, 0 not at protocol." in text


@pytest.mark.parametrize(
    ("printed", "paper", "low", "high"),
    [
        ("23.34%", 23.34, 23.335, 23.345),
        ("+1.37 pp", 1.37, 1.365, 1.375),
        ("\N{ALMOST EQUAL TO} 0.00 pp", 0, -0.005, 0.005),
        ("near 0 pp", 0, -0.5, 0.5),
        ("-1.40", -1.4, -1.405, -1.395),
        ("100", 100, 99.5, 100.5),
        ("<0.01", 0.01, 0, 0.01),
    ],
)
def test_the_last_printed_digit_is_the_tolerance(printed: str, paper: float, low: float, high: float):
    found = Expected.of(printed)
    assert (found.paper, found.low, found.high) == pytest.approx((paper, low, high))


@pytest.mark.parametrize(
    "cell", [{"paper": 1.37, "tolerance": 1.5, "printed": "+1.37 pp"}, "about one", 1.37, "1.37 +- 1.5"]
)
def test_a_tolerance_set_by_hand_is_refused(cell: object):
    with pytest.raises(InvalidInput, match="last digit is the tolerance"):
        Expected.of(cell)  # type: ignore[arg-type]


# Results of runs that were never made, put through the recipes of the SVDA paper.

SEEDS = (42, 43, 44)
Number = Callable[[str, str], float]


def injected(recipe: str, number: Number) -> ReproducedTable:
    """The table of runs at protocol whose measures are `number(row label, column key)` for every seed."""
    file = load_recipe(recipe)
    runs: list[Run] = []
    for scenario in {row.scenario for row in file.rows}:
        rules: dict = {}
        for row in (row for row in file.rows if row.scenario == scenario):
            for column in file.columns:
                if column.key in file.expected.get(row.label, {}):
                    value = number(row.label, column.key) / column.factor
                    measure = {"value": value, "low": value, "high": value}
                    rules.setdefault(row.rule, {}).setdefault(column.kind, {})[column.quantity] = measure
        runs += [
            Run(Path("nowhere"), {"rules": rules, "data": {"notes": []}}, SvdaExperiment(scenario, seed=seed))
            for seed in SEEDS
        ]
    return make_table(file, runs)


def printed(recipe: str) -> Number:
    expected = load_recipe(recipe).expected
    return lambda row, column: expected[row][column].paper


TABLES = ("svda/table1", "svda/table2", "svda/table6", "svda/table8")


@pytest.mark.parametrize("recipe", TABLES)
def test_the_papers_own_numbers_agree(recipe: str):
    found = injected(recipe, printed(recipe))
    assert found.off == () and found.verdicts["agrees"] == len(found.cells) > 0


# Of a model at chance level everything is equal to its original: nothing is lost, whatever is removed.
CHANCE = {"discrepancy": 0.0, "agreement": 100.0, "accuracy_lost": 0.0, "original_accuracy": 1 / 101 * 100}


@pytest.mark.parametrize("recipe", TABLES)
def test_a_model_at_chance_level_is_off(recipe: str):
    """It removes what the paper removes; nothing else of it agrees but what the paper prints as zero."""
    true = printed(recipe)
    saved = ("removed", "params_down", "macs_down")
    found = injected(recipe, lambda row, column: true(row, column) if column in saved else CHANCE.get(column, 0.0))
    null = {"accuracy_lost", "over_random"}
    for cell in found.cells:
        assert cell.expected is not None
        if cell.column not in saved and not (cell.column in null and cell.expected.low <= 0 <= cell.expected.high):
            assert cell.verdict == "off", (cell.row, cell.column)
    assert set(found.rows) == {cell.row for cell in found.off}


@pytest.mark.parametrize(("over_largest", "code"), [(None, 0), (0.0, 1)])
def test_reproduce_ends_in_exit_code_1_where_a_number_is_off(
    over_largest: float | None, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    true = printed("svda/table6")
    found = injected(
        "svda/table6",
        lambda row, column: true(row, column) if column == "over_random" or over_largest is None else over_largest,
    )
    monkeypatch.setattr(attnrx_lab.papers, "reproduce", lambda names, **_: [found])
    assert main(["reproduce", "svda/table6"]) == code
    assert ("off: CIFAR-10, over_largest: 0, the paper +2.08 pp" in capsys.readouterr().out) == bool(code)


def test_a_difference_between_rows_is_paired_by_seed_and_group() -> None:
    rows = tuple(Row(f"CIFAR-10, {name}", "cifar10", name, name) for name in ("ours", "theirs"))
    column = Column("over", "over theirs", "refit", "accuracy", "pp", against="theirs")
    samples = {"ours": ([70.0, 90.0, 81.0], [60.0, 70.0, 92.0]), "theirs": ([60.0, 85.0, 80.0], [55.0, 60.0, 80.0])}
    runs = []
    for seed in (1, 0):  # the order of the runs does not matter
        rules = {
            name: {"refit": {"accuracy": {"value": 0.0, "low": None, "high": None, "samples": of_seeds[seed]}}}
            for name, of_seeds in samples.items()
        }
        runs.append(Run(Path("nowhere"), {"rules": rules, "data": {"notes": []}}, SvdaExperiment("cifar10", seed=seed)))
    found = make_table(replace(RECIPE, rows=rows, columns=(column,), expected={}), runs)
    (cell,) = found.cells  # a row has no difference from itself
    interval = crossed_interval(torch.tensor([[10.0, 5.0, 1.0], [5.0, 10.0, 12.0]]))
    assert (cell.row, cell.seeds) == ("CIFAR-10, ours", pytest.approx((16 / 3, 9.0)))
    assert (cell.value, cell.low, cell.high) == pytest.approx((interval.value, interval.low, interval.high))
