"""What MkDocs calls while it makes the site: how-tos become pages, and markers in pages become what the code says.

A marker is a comment of its own line: `<!-- make: NAME -->` or `<!-- make: NAME ARGUMENT -->`.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from making import commands, literate, parts, pictures
from mkdocs.structure.files import File, Files

MARKER = re.compile(r"^<!-- make: (?P<name>\w+) ?(?P<argument>[\w.]*) -->$", re.MULTILINE)
MAKERS: Mapping[str, Callable[..., str]] = {
    "commands": commands.command_pages,
    "table": parts.table,
    "entries": parts.entries,
    "exports": parts.exports,
    "families": parts.families,
    "datasets": parts.datasets,
    "runtimes": parts.runtimes,
    "public_names": parts.public_names,
    "picture": pictures.picture,
}


def on_files(files: Files, config: Any) -> Files:
    """Adds a page for every how-to."""
    for path in literate.how_tos(Path(config["docs_dir"]) / "how-to"):
        text = literate.page(path.read_text(), literate.recorded(path), path.stem)
        files.append(File.generated(config, f"how-to/{path.stem}.md", content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replaces the markers."""
    return MARKER.sub(_made, markdown)


def _made(marker: "re.Match[str]") -> str:
    arguments = [marker["argument"]] if marker["argument"] else []
    return MAKERS[marker["name"]](*arguments)
