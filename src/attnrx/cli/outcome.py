"""The outcome of a command, printed as rich tables on a terminal, plain text elsewhere, or JSON with --json."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Table:
    """A table of texts; all columns but the first are right-aligned."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""


@dataclass(frozen=True)
class Outcome:
    """The result of a command: the record for --json, the text and tables to print, and the exit code."""

    record: Mapping[str, Any]
    shown: tuple[Table | str, ...]
    code: int = 0


def show(part: Table | str) -> None:
    """Prints a text or a table to stdout; tables are drawn with rich on a terminal only."""
    if isinstance(part, str):
        print(part)
    elif sys.stdout.isatty():
        _draw(part)
    else:
        print(plain_text(part))


def plain_text(table: Table) -> str:
    """Sets a table in columns of spaces, which scripts can read and files can hold."""
    lines = [table.columns, *table.rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(table.columns))]
    texts = [
        "  ".join(
            text.rjust(width) if column else text.ljust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    return "\n".join([table.title, *texts] if table.title else texts)


def _draw(table: Table) -> None:
    import rich.box
    import rich.console
    import rich.table
    import rich.text

    drawn = rich.table.Table(title=table.title or None, box=rich.box.SIMPLE_HEAD, title_justify="left")
    for column, name in enumerate(table.columns):
        drawn.add_column(name, justify="right" if column else "left")
    for row in table.rows:
        # As Text, because rich reads square brackets in plain strings as markup.
        drawn.add_row(*(rich.text.Text(text) for text in row))
    rich.console.Console().print(drawn)  # rich respects NO_COLOR


def as_percent(share: float | None, digits: int = 2) -> str:
    """Formats a share as a percentage."""
    return "-" if share is None else f"{100 * share:.{digits}f} %"
