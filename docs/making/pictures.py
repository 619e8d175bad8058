"""Draws the figures of docs/idea.md: the three tables of score directions, their zero patterns, and two realizations.

Each drawing is a small SVG that consists of square cells. The style sheet assets/site.css defines the colours of the
cells, so that they follow the light or dark theme of the page.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

CELL = 12  # the side of a cell with its gap, in pixels
GAP = 14  # the gap between tables, in pixels

# Each letter is a cell: 0, 1 or 2 is the head that owns it, s means shared, z is a zero from a mask, . is empty.
Table = Sequence[str]


@dataclass(frozen=True)
class Titled:
    """A table with a title. Each row is a direction, and `shades` contains the opacity of each row."""

    title: str
    rows: Table
    under: str = ""
    shades: Sequence[float] = ()


def drawing(tables: Sequence[Titled], description: str) -> str:
    """Returns an SVG that shows the tables side by side. Screen readers read the `description`."""
    parts, left, height = [], 0, 0
    top = 34 if any(table.under for table in tables) else 20
    for table in tables:
        wide = max(len(table.rows[0]) * CELL, 8 * len(table.title), 7 * len(table.under))
        parts.append(f'<text x="{left}" y="12" class="title">{escape(table.title)}</text>')
        if table.under:
            parts.append(f'<text x="{left}" y="26" class="under">{escape(table.under)}</text>')
        parts += [
            f'<rect x="{left + CELL * column}" y="{top + CELL * row}" width="{CELL - 2}" height="{CELL - 2}" '
            f'rx="2" class="cell-{NAMES[letter]}"{_shade(table, row, letter)}/>'
            for row, line in enumerate(table.rows)
            for column, letter in enumerate(line)
        ]
        left += wide + GAP
        height = max(height, top + CELL * len(table.rows))
    box = f'viewBox="0 0 {left - GAP} {height}" width="{left - GAP}" height="{height}"'
    return f'<svg class="drawn" {box} role="img" aria-label="{escape(description)}">{"".join(parts)}</svg>'


def _shade(table: Titled, row: int, letter: str) -> str:
    return f' opacity="{table.shades[row]:g}"' if table.shades and letter != "." else ""


NAMES = {"0": "first", "1": "second", "2": "third", "s": "shared", "z": "zero", ".": "empty"}


def figure(tiles: Sequence[tuple[str, str]], caption: str, kind: str = "wide") -> str:
    """Returns an HTML figure with a row of drawings, which wraps on narrow screens, and a line below each drawing."""
    shown = "".join(f"<div>{drawn}<p>{below}</p></div>" for drawn, below in tiles)
    return f'<figure class="tiles {kind}"><div class="row">{shown}</div><figcaption>{caption}</figcaption></figure>'


def _owned(blocks: Sequence[int]) -> list[str]:
    """Returns a table of strengths in which head h owns `blocks[h]` directions, with one row per direction."""
    return [
        "".join(str(owner) if head == owner else "." for head in range(len(blocks)))
        for owner, count in enumerate(blocks)
        for _ in range(count)
    ]


def tables() -> str:
    """Returns the figure of a layer's three tables, in which row r always belongs to the same direction."""
    rows = [str(owner) * 8 for owner in (0, 0, 0, 1, 1, 1, 2, 2, 2)]
    three = [Titled("query", rows, "direction x width"), Titled("key", rows, "direction x width")]
    three.append(Titled("strength", _owned((3, 3, 3)), "direction x head"))
    description = (
        "Three tables of nine rows, one for each score direction: query, key, and strength, a column per head."
    )
    below = "Row <em>r</em> of all three is one score direction."
    return figure(
        [(drawing(three, description), below)], "One layer with three heads (a colour each), three directions a head."
    )


def _falling(blocks: Sequence[int]) -> list[float]:
    """Returns opacities that decrease within every head, from its strongest to its weakest direction."""
    return [1 - 0.75 * place / count for count in blocks for place in range(count)]


PATTERNS: Sequence[tuple[str, Table, str, Sequence[float]]] = (
    ("dense", _owned((3, 3, 3)), "every strength is one", ()),
    ("SVDA", _owned((3, 3, 3)), "strengths are learned; rows of norm one", _falling((3, 3, 3))),
    ("TruncAtt", _owned((2, 2, 2)), "equal blocks, the best of each head", _falling((2, 2, 2))),
    ("IrrAtt", _owned((4, 1, 2)), "blocks of different length", _falling((4, 1, 2))),
    ("CP SlimAtt", ["sss"] * 6, "all heads share all directions", _falling((6,))),
)


def patterns() -> str:
    """Returns the figure of the zero patterns that the papers' strengths have."""
    tiles = [
        (drawing([Titled(name, rows, shades=shades)], f"The strengths of {name}: {below}."), below)
        for name, rows, below, shades in PATTERNS
    ]
    return figure(
        tiles,
        "The same table of strengths (a row per direction, a column per head) in the papers; the fuller, the stronger.",
        "narrow",
    )


def realizations() -> str:
    """Returns the figure that shows how a mask and a compression change the tables of a layer."""
    kept = "110101011"
    owners = "000111222"
    whole = _layer(owners)
    masked = [
        Titled(table.title, [_zeroed(row, keep) for row, keep in zip(table.rows, kept, strict=True)])
        if table.title == "strength"
        else table
        for table in whole
    ]
    small = [
        Titled(table.title, [row for row, keep in zip(table.rows, kept, strict=True) if keep == "1"]) for table in whole
    ]
    tiles = [
        (drawing(whole, "The whole layer: nine directions."), "<b>the reference</b>: a rule reads it, and decides"),
        (drawing(masked, "The masked layer: three strengths are zero."), "<b>mask</b>: zeros are written"),
        (drawing(small, "The compressed layer: six directions."), "<b>compress</b>: what is zero is deleted"),
    ]
    return figure(tiles, "The master law: the last two answer alike, and the last is smaller.")


def _layer(owners: str) -> list[Titled]:
    rows = [owner * 4 for owner in owners]
    strength = ["".join(owner if head == owner else "." for head in "012") for owner in owners]
    return [Titled("query", rows), Titled("key", rows), Titled("strength", strength)]


def _zeroed(row: str, keep: str) -> str:
    return row if keep == "1" else "".join("z" if letter != "." else "." for letter in row)


PICTURES: Mapping[str, Callable[[], str]] = {"tables": tables, "patterns": patterns, "realizations": realizations}


def picture(name: str) -> str:
    """Returns one of `PICTURES` as HTML, by its name."""
    return PICTURES[name]()
