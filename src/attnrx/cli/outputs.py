"""Validation of --out before the command runs: a regular file or a folder, and not an input of the command."""

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from attnrx.errors import InvalidInput

FILE, FOLDER = "file", "folder"
# Files that a command may replace in its output folder.
_REPLACED = ("config.json", "model.safetensors", "prescription.json", "evidence.json", "training.json", "plan.json")


def require_out(arguments: Namespace, writes: str, kind: str | None = None) -> None:
    """Raises InvalidInput if --out would overwrite an input, or exists and is not a regular file (or a folder).

    An existing file inside an input folder, or one named after an input file (its tensors or facts), may be replaced
    only if attnrx wrote it with the `kind` of the command's output.
    """
    if getattr(arguments, "out", None) is None:
        return
    out = Path(arguments.out)
    if writes == FOLDER:
        _require_folder(out, arguments)
        return
    if out.exists() and not out.is_file():
        found = "a folder; name a file in it" if out.is_dir() else "not a regular file; name one"
        raise InvalidInput(f"--out {out} cannot be written: it is {found}.")
    for option, given in _inputs(arguments):
        if out.exists() and (out.samefile(given) or (_belongs(out, given) and not _is(out, kind))):
            raise InvalidInput(
                f"--out {out} would overwrite an input: {_described(option, given)}. Nothing was changed; choose "
                "another file."
            )


def _require_folder(out: Path, arguments: Namespace) -> None:
    if out.exists() and not out.is_dir():
        raise InvalidInput(f"--out {out} cannot be written: it is not a folder; name one.")
    if not out.exists():
        return
    for option, given in _inputs(arguments):
        part = given.is_file() and given.name in _REPLACED and out.samefile(given.parent)
        if part or out.samefile(given):
            raise InvalidInput(
                f"--out {out} would overwrite an input: {_described(option, given)}. Inputs are never changed; choose "
                "another folder."
            )


def _inputs(arguments: Namespace) -> Iterator[tuple[str, Path]]:
    """Yields every other argument that names an existing file or folder."""
    for name, value in vars(arguments).items():
        for text in value if isinstance(value, list | tuple) else (value,):
            if name != "out" and isinstance(text, str) and _exists(text):
                yield name, Path(text)


def _exists(text: str) -> bool:
    try:
        return bool(text) and Path(text).exists()
    except (OSError, ValueError):  # a text too long for a name, or with a zero byte
        return False


def _belongs(out: Path, given: Path) -> bool:
    """Whether a file is inside an input folder, or next to an input file whose name is a prefix of its own."""
    if given.is_dir():
        return out.resolve().is_relative_to(given.resolve())
    return out.name.startswith(f"{given.name}.") and out.parent.samefile(given.parent)


def _is(out: Path, kind: str | None) -> bool:
    """Whether attnrx wrote a file of this kind; for an exported model the kind is in its facts, FILE.json."""
    from attnrx.serialization.storage import file_kind

    return kind is not None and kind in (file_kind(out), file_kind(out.with_name(f"{out.name}.json")))


def _described(option: str, given: Path) -> str:
    return f"{given} (--{option.replace('_', '-')})"
