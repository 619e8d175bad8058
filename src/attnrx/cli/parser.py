"""The parser of a command, and the validation of texts, of --out and of the environment before the command runs."""

import argparse
import os
import re
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from attnrx.support.atomic_writes import require_replaceable
from attnrx.support.errors import AttnrxError, InvalidInput, nearest

PROCESS_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")  # set by torchrun and accelerate
# Files that a command may replace in its output folder.
_REPLACED = ("config.json", "model.safetensors", "prescription.json", "evidence.json", "training.json", "plan.json")


class UsageError(AttnrxError):
    """An unknown command, or invalid arguments of a command."""


class Parser(argparse.ArgumentParser):
    """An argument parser that raises UsageError with the closest options instead of exiting."""

    def __init__(self, command: str, summary: str, example: str):
        # `add_out` sets them; `require_out` reads them after parsing.
        self.writes_folder, self.kind = False, ""  # --out: a folder, or a file of this kind
        super().__init__(
            prog=f"attnrx {command}",
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=f"example:\n  {example}",
            # Keeps the lines of the example.
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,  # an abbreviation could become ambiguous with a new option
        )
        output = self.add_argument_group("output")
        output.add_argument("--json", action="store_true", help="print one JSON object and nothing else to stdout")
        output.add_argument("--debug", action="store_true", help="show the traceback of an error")

    def error(self, message: str) -> NoReturn:
        """Raises UsageError with a hint for unknown options."""
        # By argparse's message, because no exception of it holds the option.
        unrecognized = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        options = [option for option in self._option_string_actions if option.startswith("--")]
        hint = f": {nearest(unrecognized[1], options)}" if unrecognized else "."
        raise UsageError(f"{message}{hint} See `{self.prog} --help`.")

    def parse_args(self, *given: Any, **named: Any) -> Any:
        """Parses the arguments; raises InvalidInput for texts that are empty or not UTF-8."""
        namespace = super().parse_args(*given, **named)
        # For all options at once, so that no command has to check its texts.
        for action in self._actions:
            option = action.option_strings[-1] if action.option_strings else action.dest
            for text in _texts(getattr(namespace, action.dest, None)):
                _require_text(option, text)
        return namespace


def _texts(value: object) -> list[str]:
    """Returns the texts of one argument, which may have several."""
    # With nargs an argument is a list.
    values = value if isinstance(value, list | tuple) else (value,)
    return [each for each in values if isinstance(each, str)]


def _require_text(option: str, text: str) -> None:
    if not text.strip():
        raise InvalidInput(f"{option} is empty; give a value, or omit the option.")
    # Python reads bytes of the command line that are not UTF-8 as surrogates, which are no text.
    if re.search("[\0\ud800-\udfff]", text):
        raise InvalidInput(f"{option} {text!r} has characters that are not UTF-8 text, or a null character.")


def require_environment() -> None:
    """Raises InvalidInput for process numbers of a launcher, flags and a cache folder that are not valid."""
    numbers = {}
    for name in PROCESS_VARIABLES:
        text = os.environ.get(name)
        if text is not None and not re.fullmatch(r"[0-9]{1,9}", text):
            raise InvalidInput(f"{name}={text!r} is no number; launch with torchrun or accelerate, or unset it.")
        numbers[name] = int(text or 0)
    if numbers["RANK"] and numbers["RANK"] >= numbers["WORLD_SIZE"]:
        raise InvalidInput(
            f"RANK={numbers['RANK']} with WORLD_SIZE={os.environ.get('WORLD_SIZE')}: a rank is below the number of "
            "processes; launch with torchrun or accelerate, or unset both."
        )
    for name, meaning in (("ATTNRX_MEASURE", "never measure"), ("ATTNRX_BUILD", "no C++ kernels")):
        text = os.environ.get(name, "1")
        if text not in ("", "0", "1"):
            raise InvalidInput(f"{name}={text!r}: give 0 ({meaning}) or 1.")
    cache = os.environ.get("ATTNRX_CACHE")
    if cache and Path(cache).exists() and not Path(cache).is_dir():
        raise InvalidInput(f"ATTNRX_CACHE={cache!r} is not a folder; name a folder, or unset it.")


def require_out(arguments: Namespace, parser: Parser) -> None:
    """Raises InvalidInput if --out would overwrite an input, or is not what the command writes.

    An existing file is replaced only if attnrx wrote it with the `kind` of the command's output.
    """
    if getattr(arguments, "out", None) is None or not Path(arguments.out).exists():
        return
    out = Path(arguments.out)
    for name, path in _inputs(arguments):
        # Files of its folder that the command replaces. samefile, because a link or another spelling may name an input.
        is_replaced = parser.writes_folder and path.name in _REPLACED and out.samefile(path.parent)
        if is_replaced or out.samefile(path):
            described = f"{path} (--{name.replace('_', '-')})"
            raise InvalidInput(f"--out {out} would overwrite an input: {described}; choose another place.")
    if parser.writes_folder:
        if not out.is_dir():
            raise InvalidInput(f"--out {out} cannot be written: it is not a folder; name one.")
        return
    require_replaceable(out)
    from attnrx.support.storage import file_kind  # imports torch

    # For an exported model the kind is in its facts, FILE.json.
    found = file_kind(out) or file_kind(out.with_name(f"{out.name}.json"))
    if found != parser.kind:
        what = "a file that attnrx did not write" if found is None else f"an {found}"
        raise InvalidInput(f"--out {out} would replace {what} by an {parser.kind}; choose another file, or delete it.")


def _inputs(arguments: Namespace) -> Iterator[tuple[str, Path]]:
    """Yields every other argument that names an existing file or folder."""
    for name, value in vars(arguments).items():
        for text in _texts(value) if name != "out" else ():
            try:
                exists = bool(text) and Path(text).exists()
            except (OSError, ValueError):  # a text too long for a name, or with a zero byte
                exists = False
            if exists:
                yield name, Path(text)
