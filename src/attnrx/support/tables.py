"""Formats tables as text, aligned for consoles or as Markdown with plain text in the cells.

Names of classes, methods and models come from other people's datasets and files, so every cell is escaped.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

# These characters begin code, emphasis, a tag, a cell, mathematics or a character reference, or end the text of a link.
# Other brackets, e.g. around intervals, have no meaning in Markdown.
MARKDOWN = re.compile(r"([\\`*_<>|~$&]|\](?=[(\[:]))")


def _utf8(text: str) -> str:
    # File names may contain lone surrogates, which UTF-8 cannot encode.
    return text.encode("utf-8", "backslashreplace").decode()


def markdown(words: Any) -> str:
    """Returns a text on one line, escaped so that it contains no Markdown."""
    # Line breaks are removed, because they end rows and paragraphs.
    return MARKDOWN.sub(r"\\\1", " ".join(_utf8(str(words)).split()))


def markdown_code(words: Any) -> str:
    """Returns a text as code. The fence has one backtick more than the longest run of backticks in the text."""
    text = " ".join(_utf8(str(words)).split())
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence, room = "`" * (longest + 1), " " if longest else ""
    return f"{fence}{room}{text}{room}{fence}"


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Returns a Markdown table. Cells of the class `Marked` are not escaped."""
    body = [f"| {' | '.join(map(_marked, row))} |" for row in rows]
    return "\n".join([f"| {' | '.join(map(_marked, columns))} |", "|" + "---|" * len(columns), *body])


class Marked(str):
    """A text that already is Markdown."""

    __slots__ = ()


def _marked(cell: Any) -> str:
    return cell if isinstance(cell, Marked) else markdown("" if cell is None else cell)


def aligned_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str = "") -> str:
    """Returns a table with columns aligned by spaces. All columns but the first are aligned to the right."""
    # Every row is one line. Control characters are replaced, because a terminal would execute them.
    lines = [[_plain(cell) for cell in line] for line in (columns, *rows)]
    # The widths include the headings, so that a table without rows has columns, too.
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = [
        "  ".join((first.ljust(widths[0]), *map(str.rjust, others, widths[1:]))).rstrip() for first, *others in lines
    ]
    return "\n".join([title, *texts] if title else texts)


def _plain(cell: Any) -> str:
    text = _utf8("" if cell is None else f"{cell:.4g}" if isinstance(cell, float) else str(cell))
    return "".join(sign if sign.isprintable() else " " for sign in text)
