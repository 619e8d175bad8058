"""The accounting of the compact SVDA-ViT (A.6): the numbers behind the paper's Tables 1 and 2, to the printed digit."""

from dataclasses import dataclass

import pytest

from attnrx.vit.costs import count_params
from attnrx.vit.models import build_model
from attnrx_lab.costs import direction_costs, saved_shares
from attnrx_lab.papers import load_recipe
from attnrx_lab.vision_transformer import named_config


@dataclass(frozen=True)
class Row:
    scenario: str
    removed: float  # percent of the directions, as printed
    params: int
    params_down: float  # percent, as computed here
    params_printed: float  # percent, as in the paper
    macs: int
    macs_down: float
    macs_printed: float


ROWS = {
    "Table 1, FashionMNIST": Row("fashion_mnist", 23.34, 3_167_498, 3.886, 3.89, 210_042_880, 4.202, 4.20),
    "Table 1, CIFAR-10": Row("cifar10", 23.08, 3_175_690, 3.833, 3.83, 210_567_168, 4.145, 4.14),
    "Table 1, CIFAR-100": Row("cifar100", 28.42, 3_198_820, 4.685, 4.68, 210_567_168, 5.104, 5.10),
    "Table 1, Food-101": Row("food101", 48.83, 3_383_397, 7.611, 7.61, 733_974_528, 9.467, 9.47),
    "Table 2, rho 0.85": Row("cifar10", 31.05, 3_175_690, 5.156, 5.16, 210_567_168, 5.576, 5.58),
    "Table 2, rho 0.90": Row("cifar10", 23.05, 3_175_690, 3.828, 3.83, 210_567_168, 4.139, 4.14),
    "Table 2, rho 0.95": Row("cifar10", 13.35, 3_175_690, 2.217, 2.22, 210_567_168, 2.397, 2.40),
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
def test_totals_are_exact(row: Row) -> None:
    costs = named_config("svda", row.scenario).costs()
    assert (costs.params, costs.macs) == (row.params, row.macs)


@pytest.mark.parametrize("scenario", sorted({row.scenario for row in ROWS.values()}))
def test_totals_are_those_of_the_model(scenario: str) -> None:
    assert count_params(build_model(f"svda:{scenario}")) == named_config("svda", scenario).costs().params


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
def test_savings_come_out_to_the_printed_digit(row: Row) -> None:
    costs = named_config("svda", row.scenario).costs()
    params, macs = saved_shares(costs, row.removed / 100)
    assert (round(100 * params, 3), round(100 * macs, 3)) == (row.params_down, row.macs_down)
    # The printed share of directions is itself rounded: the printed saving must be one that it can stand for.
    least, most = (saved_shares(costs, (row.removed + half) / 100) for half in (-0.005, 0.005))
    assert 100 * least[0] - 0.005 <= row.params_printed <= 100 * most[0] + 0.005
    assert 100 * least[1] - 0.005 <= row.macs_printed <= 100 * most[1] + 0.005


def test_recipes_compare_with_these_printed_numbers() -> None:
    tables = [load_recipe(f"svda/table{number}").expected for number in (1, 2)]
    cells = [cell for table in tables for cell in table.values()]
    printed = [tuple(cell[key].paper for key in ("removed", "params_down", "macs_down")) for cell in cells]
    assert printed == [(row.removed, row.params_printed, row.macs_printed) for row in ROWS.values()]


def test_one_direction_costs_a_row_and_a_bias_of_query_and_key_and_a_strength() -> None:
    for scenario, tokens in (("cifar10", 64), ("food101", 196)):
        config = named_config("svda", scenario)
        direction = direction_costs(config.attention[0], config.tokens)
        assert direction.params == 2 * (256 + 1) + 1
        assert direction.macs == tokens * (2 * 256 + tokens + 1)


def test_dense_attention_differs_by_the_diagonal() -> None:
    svda, dense = (named_config(form, "cifar10").costs() for form in ("svda", "dense"))
    assert svda.params - dense.params == 4 * 256
    assert svda.macs - dense.macs == 4 * 64 * 256
