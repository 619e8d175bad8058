"""Every recipe states where it comes from, agrees with the paper's own arithmetic, and runs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attnrx.support.errors import CheckpointError, InvalidInput, UnknownName
from attnrx.support.records import to_dict
from attnrx_lab.costs import saved_shares
from attnrx_lab.papers import load_recipe, recipe_names, reproduce
from attnrx_lab.papers.irratt_tables import CLUTTER
from attnrx_lab.papers.spot import SpotExperiment, outline_for, token_price
from attnrx_lab.vision_transformer import named_config

pytestmark = pytest.mark.usefixtures("single_precision")

SEED = 7


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny runs, which all recipes share."""
    return tmp_path_factory.mktemp("runs")


def test_all_tables_of_the_papers_are_there():
    svda, irratt = (1, 2, 6, 8), ("table1", "table2", "figure2", "figure3")
    spot = (*(f"table{number}" for number in range(1, 9)), *(f"figure{number}" for number in range(3, 8)))
    of = {"svda": [f"table{number}" for number in svda], "irratt": irratt, "spot": spot}
    assert {f"{paper}/{each}" for paper, tables in of.items() for each in tables} <= set(recipe_names())


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_states_its_source_and_has_runs_for_its_rows(name: str):
    recipe = load_recipe(name)
    assert recipe.name == name and recipe.title and recipe.paper and recipe.table and recipe.not_stated
    assert recipe.rows and recipe.columns and recipe.seeds
    assert {row.scenario for row in recipe.rows} == {protocol.scenario for protocol in recipe.protocol}


@pytest.mark.parametrize("name", recipe_names())
def test_expected_numbers_belong_to_rows_and_columns(name: str):
    file = load_recipe(name)
    assert set(file.expected) <= {row.label for row in file.rows}
    assert {column for cells in file.expected.values() for column in cells} <= {c.key for c in file.columns}


@pytest.mark.parametrize("name", ["svda/table1", "svda/table2"])
def test_papers_savings_follow_from_its_directions(name: str):
    """The closed form turns the printed share of directions into the printed savings, to the printed digit."""
    file = load_recipe(name)
    for row in file.rows:
        cells = file.expected[row.label]
        costs = named_config("svda", row.scenario).costs()
        least, most = (saved_shares(costs, share / 100) for share in (cells["removed"].low, cells["removed"].high))
        for name_of_cell, low, high in zip(("params_down", "macs_down"), least, most, strict=True):
            assert 100 * low <= cells[name_of_cell].high and cells[name_of_cell].low <= 100 * high


@pytest.mark.parametrize("name", recipe_names())
@pytest.mark.slow
def test_tiny_run_fills_the_table(name: str, runs: Path):
    if not name.startswith("svda/"):
        pytest.importorskip("timm", reason="the shapes of DeiT come from timm")
    file = load_recipe(name)
    scenario = file.rows[0].scenario
    (table,) = reproduce(name, tiny=True, seeds=(SEED,), only=scenario, folder=runs)
    rows = [row for row in file.rows if row.scenario == scenario]
    assert list(table.rows) == [row.label for row in rows]
    # The uniform cut has no uniform control, ranks from training are only priced, and a row has no difference from
    # itself; everything else is measured.
    wanted = {
        (row.label, column.key)
        for row in rows
        for column in file.columns
        if row.rule
        and not (row.rule.endswith("-constrained") and column.kind != "paper")
        and not (column.against and column.against == row.line)
    }
    assert {(cell.row, cell.column) for cell in table.cells} == wanted
    assert any("tiny" in deviation for deviation in table.deviations)
    exact = {column.key for column in file.columns if column.exact}
    compared = [cell for cell in table.cells if cell.expected is not None and cell.column not in exact]
    assert all(cell.verdict == "not at protocol" for cell in compared)
    assert (runs / f"{name}.md").read_text() == table.to_markdown()
    assert (runs / f"{name}.json").exists()


@pytest.mark.slow
def test_compression_ratios_of_irratt_are_the_papers_but_for_one(runs: Path):
    """A tiny run prices the models of the paper all the same: every printed ratio comes out, and one is not its own."""
    pytest.importorskip("timm", reason="the shapes of DeiT come from timm")
    deit = ("deit_small", "deit_base")
    (table,) = reproduce("irratt/table1", tiny=True, seeds=(SEED,), only=deit, folder=runs)
    ratios = [cell for cell in table.cells if cell.column in ("mhsa", "macs", "params")]
    assert len(ratios) == 57 and all(cell.expected is not None for cell in ratios)  # 54, and DeiT-B itself
    missed = [(cell.row, cell.column, cell.value) for cell in ratios if cell.verdict != "agrees"]
    assert missed == [("DeiT-B, CP 168, VO 32, MLP 304", "mhsa", pytest.approx(49.6141, abs=1e-4))]
    assert [cell.row for cell in table.off] == ["DeiT-B, CP 168, VO 32, MLP 304"]
    assert {cell.verdict for cell in table.cells if cell not in ratios} == {"not at protocol", None}


@pytest.mark.slow
def test_numbers_of_others_are_quoted_and_not_measured(runs: Path):
    pytest.importorskip("timm", reason="the shapes of DeiT come from timm")
    (table,) = reproduce("irratt/table2", tiny=True, seeds=(SEED,), only="deit_base", folder=runs)
    assert not {cell.row for cell in table.cells} & {"VTP", "WDPruning", "UVC"}
    assert "| VTP | \N{EN DASH} (-1.1) | \N{EN DASH} (56.8) |" in table.to_markdown()


# Where a closed form does not give what SPOT prints as GFLOPS, of a model and of its predictors: row, column, GMACs.
SPOT_MISSED = [
    ("spot/table1", "DeiT-S, DynamicViT", "gmacs", 2.981),  # printed 2.9, which it costs without its predictors
    ("spot/table1", "DeiT-S, EViT", "gmacs", 2.896),  # printed 3.0: as published its tokens leave inside a layer
    ("spot/table1", "LV-ViT-T, DynamicViT", "gmacs", 2.260),  # printed 2.0, as for SPOT: a keep ratio of 0.5
    ("spot/table1", "LV-ViT-T, SPOT", "gmacs", 2.270),
    ("spot/table1", "LV-ViT-S, DynamicViT", "gmacs", 4.650),  # printed 4.6, from which 4.65008 is not rounded
    ("spot/table1", "LV-ViT-S, EViT", "gmacs", 4.567),  # printed 4.7
    ("spot/table1", "LV-ViT-S, SPOT", "gmacs", 4.675),  # printed 4.5, which it costs without its predictors
    ("spot/table5", "LV-ViT-T, SPOT", "gmacs", 2.270),  # as in Table 1
    ("spot/table5", "LV-ViT-S, SPOT", "gmacs", 4.675),
    ("spot/table3", "DeiT-S, SPViT + SPOT", "gmacs", 3.007),  # printed 2.9, as SPViT
    ("spot/table8", "DeiT-S, head-averaged attention", "predictors", 0.1075),  # printed 0.106, which 12 features give
    # The changes of the nine rows of Tables 1 and 5 above, and the printed -1.5 of both: 2.9 is 1.7 less than 4.6.
    ("spot/table5", "LV-ViT-T, SPOT", "gmacs_change", -0.6),
    ("spot/table5", "LV-ViT-S, SPOT", "gmacs_change", -1.9),
    ("spot/table1", "DeiT-S, DynamicViT", "gmacs_change", -1.6),
    ("spot/table1", "DeiT-S, EViT", "gmacs_change", -1.7),
    ("spot/table1", "LV-ViT-T, DynamicViT", "gmacs_change", -0.6),
    ("spot/table1", "LV-ViT-T, SPOT", "gmacs_change", -0.6),
    ("spot/table1", "LV-ViT-S, DynamicViT", "gmacs_change", -1.9),
    ("spot/table1", "LV-ViT-S, EViT", "gmacs_change", -2.0),
    ("spot/table1", "LV-ViT-S, SPOT", "gmacs_change", -1.9),
    ("spot/table3", "DeiT-S, SPViT", "gmacs_change", -1.7),
    ("spot/table3", "DeiT-S, SPViT + SPOT", "gmacs_change", -1.6),
]


def test_gflops_of_spot_follow_but_for_some():
    """Every printed cost is that of the method on the shapes of its backbone; nothing is built or trained for it."""
    pytest.importorskip("timm", reason="the shapes of DeiT come from timm")
    missed, met = [], 0
    for name in recipe_names():
        if not name.startswith("spot/"):
            continue
        file = load_recipe(name)
        for protocol in file.protocol:
            if not isinstance(protocol, SpotExperiment):
                continue
            rows = [row for row in file.rows if (row.scenario, row.rule) == (protocol.scenario, protocol.method.name)]
            cells = {
                (row.label, column): cell
                for row in rows
                for column, cell in file.expected.get(row.label, {}).items()
                if column in ("gmacs", "gmacs_change", "predictors")
            }
            price = token_price(outline_for(protocol.model, protocol.subject), protocol.method) if cells else {}
            for (row, column), cell in cells.items():
                met += 1
                if not cell.low - 1e-9 <= price[column] <= cell.high + 1e-9:
                    missed.append((name, row, column, price[column]))
    assert met > 40
    wanted = [(*where, pytest.approx(gmacs, abs=6e-4)) for *where, gmacs in SPOT_MISSED]
    assert sorted(missed, key=lambda cell: cell[:3]) == sorted(wanted, key=lambda cell: cell[:3])


@pytest.mark.parametrize("name", recipe_names())
def test_protocols_fulfil_the_contract_of_an_experiment(name: str, tmp_path: Path):
    protocols = load_recipe(name).protocol
    assert len({protocol.place for protocol in protocols}) == len(protocols)
    for protocol in protocols:
        own = protocol.seeded(SEED)
        assert own.seed == SEED and own.deviations(protocol) == [] and own.changed({}) == own
        assert own.as_tiny().tiny and own.as_tiny().place != own.place != protocol.place
        assert set(own.knobs) <= to_dict(own).keys()
        own.claim(tmp_path / own.place)
        own.require(tmp_path / own.place)
        with pytest.raises(CheckpointError, match=f"seed was {SEED} and is now {SEED + 1}"):
            own.seeded(SEED + 1).require(tmp_path / own.place)


@pytest.mark.parametrize(("name", "knob"), [("irratt/table1", "draws"), ("svda/table1", "weights")])
def test_a_knob_that_an_experiment_lacks_is_refused_by_name(name: str, knob: str, tmp_path: Path):
    requested: dict[str, Any] = {knob: 3}
    with pytest.raises(InvalidInput, match=rf"{knob}=3.*has no such knob; it has .*epochs.*Leave {knob} out"):
        reproduce(name, tiny=True, folder=tmp_path, **requested)
    assert list(tmp_path.iterdir()) == []


def test_only_must_be_a_dataset_of_the_recipe(tmp_path: Path):
    with pytest.raises(UnknownName, match="cifar10"):
        reproduce("svda/table2", only="cifar", tiny=True, folder=tmp_path)
    # It has a run for every method of each scenario.
    with pytest.raises(UnknownName, match="one of cifar10_small, cluttered_digits, deit_small, vit_tiny"):
        reproduce("spot/table2", only="nothing", tiny=True, folder=tmp_path)


@pytest.mark.slow
def test_the_constrained_cp_is_trained_and_its_directions_are_divided(tmp_path: Path) -> None:
    """Without epochs it has a price only; with them a model whose heads own their directions."""
    name = "irratt-192-constrained"
    keys = [(name, "measured", "accuracy")]
    priced = CLUTTER.as_tiny().run(tmp_path / "priced", keys=keys).record["rules"][name]
    assert set(priced) == {"paper"}
    trained = replace(CLUTTER.as_tiny(), epochs=2, learning_rate=1e-3)
    found = trained.run(tmp_path / "trained", keys=keys).record["rules"][name]
    assert found["measured"]["accuracy"]["value"] > 0
    assert 0 < found["realized"]["macs_percent"]["value"] < 100
    folders = {path.name for path in (tmp_path / "trained" / "train").iterdir()}
    assert folders >= {name, f"{name}-constraints"}
