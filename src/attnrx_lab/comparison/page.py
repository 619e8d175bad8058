"""An HTML page that shows tables and filters their rows, in one self-contained file."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from html import escape

from attnrx.support.tables import aligned_table, markdown_table

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem;color:#1f2328;background:#fff}
table{border-collapse:collapse;margin:1rem 0;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .7rem;border-bottom:1px solid #8884;text-align:right}
td:not(:last-child){white-space:nowrap}
section{overflow-x:auto}
td:last-child{min-width:12rem}
th:nth-child(-n+2),td:nth-child(-n+2),td:last-child{text-align:left}
th button{all:unset;cursor:pointer;font-weight:600}
label{margin-right:1rem}
@media(prefers-color-scheme:dark){body{color:#d0d7de;background:#0d1117}}
"""
# The script hides rows and tables that do not match. A click on a heading sorts by the first number in each cell.
SCRIPT = """
const all = (selector, part = document) => [...part.querySelectorAll(selector)];
const [task, budget, method] = ["task", "budget", "method"].map((id) => document.getElementById(id));
const filter = () => {
  for (const section of all("section")) {
    section.hidden = task.value !== "" && section.dataset.task !== task.value;
    for (const row of all("tbody tr", section)) {
      const cells = row.cells;
      const named = cells[1].textContent.toLowerCase().includes(method.value.toLowerCase());
      row.hidden = !named || (budget.value !== "" && cells[0].textContent !== budget.value);
    }
  }
};
for (const part of [task, budget, method]) part.addEventListener("input", filter);
const number = (row, column) => {
  const found = row.cells[column].textContent.match(/-?[0-9.]+/);
  return found ? Number(found[0]) : -Infinity;
};
for (const button of all("th button")) button.addEventListener("click", () => {
  const head = button.parentElement, body = head.closest("table").tBodies[0], column = head.cellIndex;
  const sign = (head.dataset.sign = -(head.dataset.sign || 1));
  body.append(...[...body.rows].sort((a, b) => column === 1
    ? -sign * a.cells[1].textContent.localeCompare(b.cells[1].textContent)
    : sign * (number(a, column) - number(b, column))));
});
"""


@dataclass(frozen=True)
class Table:
    """A table with the results of all methods on one task. The first two columns are the budget and the method."""

    task: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def to_markdown(self) -> str:
        """Returns a heading and the table."""
        return f"## {self.task}\n\n{markdown_table(self.columns, self.rows)}"

    def to_text(self) -> str:
        """Returns the table as plain text, with columns aligned by spaces."""
        return aligned_table(self.columns, self.rows, self.task)

    def to_html(self) -> str:
        """Returns an HTML section with a heading and the table."""
        head = "".join(f'<th scope="col"><button>{escape(name)}</button></th>' for name in self.columns)
        body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in self.rows)
        task = escape(self.task)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        return f'<section data-task="{task}"><h2>{task}</h2>{table}</section>'


def page_of(tables: Sequence[Table], about: str) -> str:
    """Returns an HTML page with filters, the tables, and the text `about` below the tables."""
    budgets = dict.fromkeys(row[0] for table in tables for row in table.rows)
    options = {"task": [table.task for table in tables], "budget": list(budgets)}
    filters = "".join(
        f'<label>{name} <select id="{name}"><option value="">all</option>'
        + "".join(f"<option>{escape(value)}</option>" for value in values)
        + "</select></label>"
        for name, values in options.items()
    )
    digest = base64.b64encode(sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width"><title>attnrx bench</title>'
        f"<style>{STYLE}</style></head>\n<body><h1>Methods at equal budgets</h1>"
        f'<p>{filters}<label>method <input id="method" type="search"></label></p>\n'
        + "\n".join(table.to_html() for table in tables)
        + f"\n<p>{escape(about)}</p><script>{SCRIPT}</script></body></html>\n"
    )
