"""Formats tables as plain text with aligned columns (for consoles), or as Markdown.

Text in Markdown cells is escaped, because it may contain names of classes and models from other people's files.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

# The characters that have a meaning in Markdown, which are escaped. A bracket only has a meaning at the end of a link's
# text, so brackets around intervals are not escaped.
MARKDOWN = re.compile(r"([\\`*_<>|~$&]|\](?=[(\[:]))")


def _utf8(text: str) -> str:
    # File names may contain lone surrogates. They are escaped, because UTF-8 cannot encode them.
    return text.encode("utf-8", "backslashreplace").decode()


def markdown(words: Any) -> str:
    """Joins the lines of a text, and escapes the characters that have a meaning in Markdown."""
    # Line breaks become spaces, because in Markdown they end a row of a table.
    return MARKDOWN.sub(r"\\\1", " ".join(_utf8(str(words)).split()))


def markdown_code(words: Any) -> str:
    """Formats a text as Markdown code, between delimiters that are longer than any run of backticks in the text."""
    text = " ".join(_utf8(str(words)).split())
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence, room = "`" * (longest + 1), " " if longest else ""
    return f"{fence}{room}{text}{room}{fence}"


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Returns a Markdown table. Cells of the class `Marked` are not escaped."""
    body = [f"| {' | '.join(map(_marked, row))} |" for row in rows]
    return "\n".join([f"| {' | '.join(map(_marked, columns))} |", "|" + "---|" * len(columns), *body])


class Marked(str):
    """A string that is already Markdown, so `markdown_table` does not escape it."""

    __slots__ = ()


def _marked(cell: Any) -> str:
    return cell if isinstance(cell, Marked) else markdown("" if cell is None else cell)


def aligned_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str = "") -> str:
    """Formats a table as plain text with aligned columns. All columns except the first are right-aligned."""
    # Control characters become spaces. A line break would split the row, and a terminal would execute other controls.
    lines = [[_plain(cell) for cell in line] for line in (columns, *rows)]
    # The widths include the headings, so that the headings of a table without rows are spaced, too.
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = [
        "  ".join((first.ljust(widths[0]), *map(str.rjust, others, widths[1:]))).rstrip() for first, *others in lines
    ]
    return "\n".join([title, *texts] if title else texts)


def _plain(cell: Any) -> str:
    text = _utf8("" if cell is None else f"{cell:.4g}" if isinstance(cell, float) else str(cell))
    return "".join(sign if sign.isprintable() else " " for sign in text)
