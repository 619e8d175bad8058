"""Compares every cost that the SPOT paper prints with attnrx's closed form, which needs no weights.

    python benchmarks/spot_costs.py

A cell is marked "off" if the computed cost does not round to the printed number. Operations are counted as in
`attnrx_lab.costs`.
"""

import argparse
import json
from collections.abc import Sequence
from importlib import resources

from attnrx.support.tables import markdown_table
from attnrx_lab.papers.spot import ORIGINAL, SpotExperiment, outline_for, token_price
from attnrx_lab.papers.spot_tables import RECIPES, SUBJECTS

DIGITS = {"gmacs": 1, "gmacs_change": 1, "predictors": 3}
TABLES = ("table1", "table2", "table3", "table4", "table5", "table7", "table8", "figure5")


def rows() -> list[tuple[str, str, str, str, str, str]]:
    """Returns table, row, quantity, printed number and computed number, and "off" if the numbers disagree."""
    printed = json.loads(resources.files("attnrx_lab.papers").joinpath("spot.json").read_text(encoding="utf-8"))
    found = []
    for table in TABLES:
        protocol = [each for each in RECIPES[table].protocol if isinstance(each, SpotExperiment)]
        methods = {(each.scenario, each.method.name): each.method for each in protocol}
        subjects = {each.scenario: each.subject for each in protocol}
        for row in RECIPES[table].rows:
            expected = printed.get(table, {}).get(row.label, {})
            # A run of Table 4 also measures the original.
            method = ORIGINAL if row.rule == ORIGINAL.name else methods.get((row.scenario, row.rule or ""))
            if method is None or not expected.keys() & DIGITS.keys():
                continue
            subject = subjects[row.scenario]
            costs = token_price(outline_for(SUBJECTS[subject].model, subject), method)
            for quantity in (name for name in DIGITS if name in expected):
                digits = DIGITS[quantity]
                text = f"{costs[quantity]:.{digits + 1}f}"
                agrees = _rounds_to(costs[quantity], expected[quantity], digits)
                found.append((table, row.label, quantity, expected[quantity], text, "" if agrees else "off"))
    return found


def _rounds_to(value: float, printed: str, digits: int) -> bool:
    if printed.startswith("<"):
        return value < float(printed[1:])
    return abs(value - float(printed)) <= 0.5 * 10**-digits + 1e-9


def main(words: Sequence[str] | None = None) -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(words)
    cells = rows()
    print(markdown_table(("table", "row", "quantity", "printed", "closed form", ""), cells))
    print(f"\n{sum(cell[-1] == 'off' for cell in cells)} of {len(cells)} cells are off")


if __name__ == "__main__":
    main()
