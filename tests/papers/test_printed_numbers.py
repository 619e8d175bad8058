"""The page about the papers, the printed numbers that recipes compare with, and pages that quote them agree."""

import re
from pathlib import Path

from attnrx_lab.papers import load_recipe, recipe_names
from attnrx_lab.papers.recipe import Expected

RESULTS = Path(__file__).parents[2] / "docs" / "results"
PAGE = (RESULTS / "papers.md").read_text(encoding="utf-8")
OUR_OWN = {"svda/realizations", "spot/testbed"}  # tables that no paper has

# The columns of SVDA's Table 1 by what its page calls them.
SVDA_ROWS = {
    "directions removed": "removed",
    "parameters saved": "params_down",
    "MACs saved": "macs_down",
    "renormalized against mask: discrepancy": "discrepancy",
    "renormalized against mask: unchanged": "agreement",
}
SVDA_RHO_ROWS = {
    "directions removed": ("svda/table2", "removed"),
    "accuracy lost (points)": ("svda/table2", "accuracy_lost"),
    "discrepancy to the mask": ("svda/table2", "discrepancy"),
    "points over random, renormalized": ("svda/table8", "over_random"),
    "points over largest, renormalized": ("svda/table8", "over_largest"),
}


def table_rows(text: str) -> list[list[str]]:
    """Returns the cells of every line of a Markdown table."""
    return [[cell.strip() for cell in line.strip("| ").split("|")] for line in text.splitlines() if line[:1] == "|"]


def number(text: str) -> float:
    return Expected.of(text.replace("\N{NO-BREAK SPACE}", " ").replace(" %", "%")).paper


def test_the_page_counts_the_printed_numbers() -> None:
    cells = sum(len(row) for name in recipe_names() for row in load_recipe(name).expected.values())
    assert f"All {cells} printed numbers" in PAGE


def test_every_recipe_of_a_paper_is_on_the_page() -> None:
    named = set()
    # `svda/table1`, `2`, `6` are three recipes.
    for paper, kind, first, others in re.findall(r"`(\w+)/(table|figure)(\d)`((?:, `\d`)*)", PAGE):
        named |= {f"{paper}/{kind}{digit}" for digit in (first, *re.findall(r"\d", others))}
    assert named == set(recipe_names()) - OUR_OWN


def test_costs_of_spot_that_differ_are_quoted_as_printed() -> None:
    """The closed forms themselves are those of `test_recipes.py`."""
    quoted = 0
    for table, rows, printed, computed in (row for row in table_rows(PAGE) if len(row) == 4 and row[0].isdigit()):
        model, _, methods = rows.partition(": ")
        methods, _, predictors = methods.partition(" (")
        for method, text, form in zip(*(each.split("; ") for each in (methods, printed, computed)), strict=True):
            cell = load_recipe(f"spot/table{table}").expected[f"{model}, {method}"]
            expected = cell["predictors" if predictors else "gmacs"]
            assert text == expected.printed
            assert not expected.low <= float(form) <= expected.high or form == "4.65", (method, form)
            quoted += 1
    assert quoted == 9


def test_the_page_of_svda_quotes_the_paper() -> None:
    rows = {row[0]: row[1:] for row in table_rows((RESULTS / "svda.md").read_text(encoding="utf-8")) if len(row) == 5}
    for label, key in SVDA_ROWS.items():
        for title, text in zip(("FashionMNIST", "CIFAR-10"), rows[label][1::2], strict=True):
            assert number(text) == load_recipe("svda/table1").expected[title][key].paper, (label, title)


def test_the_page_of_svda_quotes_the_paper_over_rho() -> None:
    rows = {row[0]: row[1:] for row in table_rows((RESULTS / "svda.md").read_text(encoding="utf-8")) if len(row) == 3}
    for label, (name, key) in SVDA_RHO_ROWS.items():
        for rho, text in zip(("0.85", "0.95"), rows[label], strict=True):
            (quoted,) = re.findall(r"\((-?[\d.]+)\)", text)
            assert number(quoted) == load_recipe(name).expected[f"rho = {rho}"][key].paper, (label, rho)
