"""Converts how-tos, which are Python files with prose in comments, to pages that show what each cell prints.

A code cell begins at `# %%`, and a prose cell, in which every line is a comment, at `# %% [markdown]`. You can run a
how-to like any Python file. To record the outputs that the pages show, run

    python docs/making/literate.py docs/how-to/*.py

which runs each file in a scratch folder, and writes the output of each code cell to NAME.json beside the file.
"""

import io
import json
import os
import re
import sys
import tempfile
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

MARK = re.compile(r"^# %%(?P<kind>.*)$")
NUMBER = re.compile(r"[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?")


@dataclass(frozen=True)
class Cell:
    """A cell of a how-to, with its `kind` ("prose" or "code"), its text, and the line where it begins."""

    kind: str
    text: str
    line: int


def how_tos(folder: Path) -> list[Path]:
    """Returns the Python files in a folder that contain cells."""
    return [path for path in sorted(folder.glob("*.py")) if cells(path.read_text())]


def cells(source: str) -> list[Cell]:
    """Divides the source of a how-to into cells. The text before the first cell is not shown on the page."""
    found: list[tuple[str, int, list[str]]] = []
    for number, line in enumerate(source.splitlines(), start=1):
        mark = MARK.match(line)
        if mark:
            found.append(("prose" if "[markdown]" in mark["kind"] else "code", number, []))
        elif found:
            found[-1][2].append(line)
    return [Cell(kind, _told(kind, lines), line) for kind, line, lines in found]


def page(source: str, printed: list[str], name: str) -> str:
    """Returns a how-to as a Markdown page, with the recorded output below each code cell."""
    parts = []
    outputs = iter(printed)
    for cell in cells(source):
        if cell.kind == "prose":
            parts.append(cell.text)
            continue
        said = next(outputs, "")
        parts.append(f"```python\n{cell.text}\n```")
        if said:
            parts.append(_shown(said.rstrip()))
    parts.append(f"---\n\nThis page is a file that runs: [{name}.py]({name}.py).")
    return "\n\n".join(parts) + "\n"


def _shown(said: str) -> str:
    """Returns a cell's output as Markdown. Tables are shown as tables, and all other text as a code block."""
    if all(line.startswith("|") for line in said.splitlines()):
        return said
    return f'```{{.text .printed title="prints"}}\n{said}\n```'


def run(path: Path) -> list[str]:
    """Runs the cells of a file in one namespace, and returns the output of each code cell."""
    source = path.read_text()
    sys.path.insert(0, str(path.parent))  # Python does the same for scripts
    space: dict[str, object] = {"__name__": "__main__", "__file__": str(path)}
    printed = []
    for cell in cells(source):
        if cell.kind == "code":
            out = io.StringIO()
            code = compile("\n" * cell.line + cell.text, str(path), "exec")
            with redirect_stdout(out):
                exec(code, space)
            printed.append(out.getvalue())
    return printed


def without_numbers(printed: list[str]) -> list[str]:
    """Returns the outputs without numbers and column widths, because these differ between machines."""
    return [" ".join(re.sub(r"-+", "-", NUMBER.sub("#", text)).split()) for text in printed]


def recorded(path: Path) -> list[str]:
    """Returns the recorded outputs of a how-to's code cells."""
    return json.loads(path.with_suffix(".json").read_text())


def record(path: Path) -> None:
    """Runs a how-to and writes the outputs of its code cells to a JSON file beside it."""
    path.with_suffix(".json").write_text(json.dumps(run(path), indent=1) + "\n")


def _told(kind: str, lines: list[str]) -> str:
    text = "\n".join(lines).strip("\n")
    return re.sub(r"^# ?", "", text, flags=re.MULTILINE) if kind == "prose" else text


if __name__ == "__main__":
    requested = [Path(word).resolve() for word in sys.argv[1:]]
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        for each in requested:
            if cells(each.read_text()):
                record(each)
