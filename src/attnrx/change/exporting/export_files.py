"""The files of an export beside each other: which of them attnrx wrote, and the removal of an outdated export."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from attnrx.change.exporting.exported import KIND, facts_path, present_facts
from attnrx.change.exporting.format import Format, script_path
from attnrx.support.atomic_writes import require_absent, require_replaceable
from attnrx.support.errors import InvalidInput
from attnrx.support.storage import file_kind

SEAL = "# Written by attnrx; edited since, if this is not the hash of the lines above: {}\n"


def sealed_script(script: str) -> str:
    """Returns a script with a last line by which it is recognized as unedited."""
    return script + SEAL.format(hashlib.sha256(script.encode()).hexdigest()[:16])


def present_script(path: Path) -> Path | None:
    """Returns the script beside an exported file; None if there is none, or another file, or an edited script."""
    script = script_path(path)
    try:
        text = script.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
    body = text[: text.rfind(SEAL.partition("{")[0])]
    # Files with one stem have one name for their scripts: a script belongs to the file that it opens.
    return script if text == sealed_script(body) and f'"{path.name}"' in body else None


def require_export_path(path: Path, form: Format, with_script: bool) -> None:
    """Raises InvalidInput if an export would overwrite facts, further files or a script that attnrx did not write."""
    require_replaceable(path)
    facts_file, script = facts_path(path), script_path(path)
    if os.path.lexists(facts_file) and file_kind(facts_file) != KIND:
        raise InvalidInput(
            f"the facts go into {facts_file}, which exists and was not written by an export: move it away, or choose "
            "another name."
        )
    if with_script and os.path.lexists(script) and present_script(path) is None:
        raise InvalidInput(
            f"the script that runs {path.name} goes into {script}, which exists and was edited or not written by an "
            "export: move it away, or choose another name."
        )
    files = form.files(path)
    if len(files) > 1:
        require_replaceable_files(path, files)


def require_replaceable_files(path: Path, files: Iterable[Path]) -> None:
    """Raises InvalidInput for an existing one of `files` that is none of an earlier export at the path."""
    facts = present_facts(path)
    own = set() if facts is None else {path.with_name(name) for name in facts["files"]}
    require_absent(list(files), own.__contains__)


def present_exports(folder: Path) -> dict[Path, dict[str, Any]]:
    """Returns the facts of the exports in a folder by their main files, of those whose files were not changed."""
    paths = (facts.with_name(facts.name.removesuffix(".json")) for facts in sorted(folder.glob("*.json")))
    return {path: facts for path in paths if (facts := present_facts(path)) is not None}


def remove_export(path: Path) -> None:
    """Deletes an export: its facts, its files and its script, unless they were changed."""
    facts, script = present_facts(path), present_script(path)
    if facts is None:
        return
    # The facts first: files without facts are not taken for an export.
    facts_path(path).unlink()
    for name in facts["files"]:
        path.with_name(name).unlink(missing_ok=True)
    if script is not None:
        script.unlink()
