"""A how-to: one Python file whose comments are prose, made into a page, and run cell by cell to record what it prints.

Cells begin at `# %%` (code) and `# %% [markdown]` (prose, every line a comment). A file runs as it is. Run as a script,

    python docs/making/literate.py docs/how-to/*.py

this runs the files in a scratch folder and writes what each cell printed beside them, in NAME.json, for their pages.
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
    """Prose or code, and the line of the file where it begins."""

    kind: str
    text: str
    line: int


def how_tos(folder: Path) -> list[Path]:
    """Gives the files of a folder that have cells."""
    return [path for path in sorted(folder.glob("*.py")) if cells(path.read_text())]


def cells(source: str) -> list[Cell]:
    """Cuts a file into its cells; what stands before the first mark is for people who open the file."""
    found: list[tuple[str, int, list[str]]] = []
    for number, line in enumerate(source.splitlines(), start=1):
        mark = MARK.match(line)
        if mark:
            found.append(("prose" if "[markdown]" in mark["kind"] else "code", number, []))
        elif found:
            found[-1][2].append(line)
    return [Cell(kind, _told(kind, lines), line) for kind, line, lines in found]


def page(source: str, printed: list[str], name: str) -> str:
    """Gives the page: prose as it is, code as code, and below each cell what it printed."""
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
    """Shows what a cell printed: a table of Markdown as a table, all else as it is."""
    if all(line.startswith("|") for line in said.splitlines()):
        return said
    return f'```{{.text .printed title="prints"}}\n{said}\n```'


def run(path: Path) -> list[str]:
    """Runs a file cell by cell in one namespace and gives what each cell printed."""
    source = path.read_text()
    sys.path.insert(0, str(path.parent))  # as for a script
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
    """Gives the words of what was printed: numbers differ from machine to machine, and so do widths of columns."""
    return [" ".join(re.sub(r"-+", "-", NUMBER.sub("#", text)).split()) for text in printed]


def recorded(path: Path) -> list[str]:
    """Reads what a file printed when it was last recorded."""
    return json.loads(path.with_suffix(".json").read_text())


def record(path: Path) -> None:
    """Runs a file and writes what it printed."""
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
