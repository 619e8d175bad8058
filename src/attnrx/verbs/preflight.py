"""What can be known before a model is loaded: extras, formats, datasets, columns and output folders."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from attnrx.change.exporting import Format
from attnrx.data import Columns
from attnrx.data.loading import locate
from attnrx.support.errors import CheckpointError
from attnrx.support.optional import require_installed


def preflight(
    *,
    data: Any = None,
    columns: Columns | None = None,
    folder: Path | str | None = None,
    formats: Iterable[Format] = (),
    report: bool = False,
) -> None:
    """Checks what a long call will need, in the first second.

    `data` is checked where it is a name or a path, `formats` are those of the files to write; with `report`
    the call writes the HTML report.

    Raises:
        NotSupported: A library is missing; the message names the extra that installs it.
        DataError: There is no such dataset, or it lacks a column that was named.
        CheckpointError: The output folder cannot be written.
    """
    if report:
        require_installed("report", "the report", "jinja2")
    for form in formats:
        require_installed(form.extra, f"the format {form.name}", *form.libraries)
    if folder is not None:
        folder = Path(folder)
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not existing.is_dir():
            raise CheckpointError(f"{folder} cannot be written: {existing} is not a folder; choose another one.")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise CheckpointError(f"{folder} cannot be written: no permission for {existing}; choose another one.")
    if isinstance(data, str | Path):
        locate(data, columns or Columns())
