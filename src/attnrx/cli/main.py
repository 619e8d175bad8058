"""The entry point: parses the command line, runs the command, prints its outcome and returns an exit code."""

import json
import os
import re
import signal
import sys
import traceback
import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import wraps
from pathlib import Path
from types import FrameType

import attnrx as rx
from attnrx.cli.commands import COMMANDS
from attnrx.cli.options import Command, Parser, UsageError, require_inputs, texts_of
from attnrx.support.atomic_writes import real_path, require_replaceable
from attnrx.support.errors import (
    AttnrxError,
    CardWarning,
    DataError,
    InvalidInput,
    ScaleWarning,
    UserCodeError,
    is_out_of_memory,
    nearest,
)
from attnrx.support.optional import environment, import_file
from attnrx.support.progress import DETAILED, SETTING, say
from attnrx.support.signals import STOPPING, handling

# The exit codes. 70 is EX_SOFTWARE in sysexits.h. Codes above 128 are 128 plus the number of a signal.
BAD_INPUT, BAD_DATA, DEFECT, INTERRUPTED, PIPE_CLOSED = 2, 3, 70, 130, 141

PROCESS_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")  # set by torchrun and accelerate
# The files that a command may replace in its output folder. None of them may be an input of the same command.
_REPLACED = (
    *("config.json", "model.safetensors", "prescription.json", "evidence.json", "training.json", "plan.json"),
    "attnrx.json",
)

EPILOG = """\
Results go to stdout and to files, progress and errors to stderr. With --json every command prints one JSON object.
`attnrx COMMAND --help` shows the options and an example.

exit codes:
  0    done, and no claim that was checked fails (each holds, or is undecided and reported as such)
  1    done, and a claim (verify, demo) or the target (shrink) fails, or a number contradicts the paper's (reproduce)
  2    wrong usage or input: what was requested, what was found and what to do is on stderr
  3    a dataset that is missing, unreadable or invalid
  70   a bug of attnrx, with its traceback
  130  interrupted: every file is whole, and a training continues from its checkpoint when it is run again
  143  terminated (SIGTERM): every file is whole; a training saves a checkpoint first and exits with 130
  129  the terminal was closed (SIGHUP): as 143
"""


# The base class is KeyboardInterrupt, so that no `except Exception` on the way to the handler catches the error.
class _Terminated(KeyboardInterrupt):
    """The exception for SIGTERM or SIGHUP outside a training run."""

    def __init__(self, number: int):
        super().__init__(f"terminated ({signal.Signals(number).name}); every file that was written is whole.")
        self.code = 128 + number


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. Exceptions are printed as messages, and become exit codes."""
    words = list(sys.argv[1:] if argv is None else argv)
    _open_streams()
    try:
        with _terminable():
            code = _guarded(words)
        # The output is flushed here and not at exit, so that a closed pipe or a full disk is handled below.
        sys.stdout.flush()
        if "torch" in sys.modules:
            from torch import distributed

            # A process that exits within its launcher's process group may crash in gloo's threads.
            if distributed.is_available() and distributed.is_initialized():
                distributed.destroy_process_group()
        return code
    # Interrupts outside the command are also handled here, e.g. while its results are printed.
    except KeyboardInterrupt as stop:
        message = str(stop) or "interrupted; every file that was written is whole."
        return _report_error(words, stop, message, stop.code if isinstance(stop, _Terminated) else INTERRUPTED)
    except BrokenPipeError:
        # The reader closed the pipe, e.g. `| head`. Without the redirection, Python would print another error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except OSError as error:  # the flush failed, e.g. because the disk is full (`_guarded` handles errors of commands)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _report_error([], error, f"the results cannot be printed: {error.strerror or error}.", BAD_INPUT)


def _open_streams() -> None:
    """Replaces standard streams that are closed (`>&-`). The others escape characters that their encoding lacks."""
    for name, mode in (("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            # Without the stream, a file could get the stream's number, and libraries would print into the file.
            setattr(sys, name, Path(os.devnull).open(mode))
        elif hasattr(stream, "reconfigure") and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


@wraps(say)
def log(line: str) -> None:
    """Prints a progress message to stderr, only in the process with rank 0."""
    if _is_first_process():
        say(line)


@contextmanager
def _terminable() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP raise an exception, so that temporary files are deleted. Keeps existing handlers."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise _Terminated(number)

    with handling((each for each in STOPPING if signal.getsignal(each) is signal.SIG_DFL), stop):
        yield


def _guarded(words: list[str]) -> int:
    """Runs the command line and maps every error to a message and an exit code."""
    try:
        return _run(words)
    except BrokenPipeError:  # raised again before OSError is caught, because `main` handles a closed pipe
        raise
    except SystemExit as stop:  # raised by argparse after --help
        return stop.code if isinstance(stop.code, int) else BAD_INPUT
    # An OSError is also an input error, because it names a file that is missing or cannot be written.
    except (AttnrxError, OSError) as error:
        return _report_error(words, error, str(error), BAD_DATA if isinstance(error, DataError) else BAD_INPUT)
    except Exception as error:
        if is_out_of_memory(error):
            message = f"not enough memory ({str(error).partition(chr(10))[0]}); take a smaller batch or model."
            return _report_error(words, error, message, BAD_INPUT)
        message = f"{type(error).__name__}: {error}\nThis is a defect of attnrx, not of your input; please report it."
        return _report_error(words, error, message, DEFECT)


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        # A command line without a command is a usage error, so the overview goes to stderr.
        print(overview(), file=sys.stdout if words else sys.stderr)
        return 0 if words else BAD_INPUT
    if words[0] == "--version":
        print(f"attnrx {rx.__version__}")
        return 0
    require_environment()
    command, parser, arguments = parsed(words)
    # The output path is checked before the command runs, so that no work is lost if it cannot be written.
    require_out(arguments, parser)
    for plugin in arguments.plugin:
        import_file(plugin)
    require_inputs(arguments)
    is_detailed = "--debug" in words
    detailed = environment(SETTING, os.environ.get(SETTING, DETAILED)) if is_detailed else nullcontext()
    with detailed, warnings.catch_warnings():
        warnings.simplefilter("always", ScaleWarning)  # by default, Python shows a repeated warning only once
        warnings.showwarning = show_warning
        try:
            outcome = command.run(arguments, log)
        except SystemExit as stop:  # raised by user code, whose exit code must not become the command's
            raise UserCodeError(f"code of a model or of data ended the process (SystemExit: {stop}).") from stop
    if _is_first_process():
        # json.dumps would write NaN and infinity as words that JSON does not have.
        print(rx.serialization.json_text(outcome.record).rstrip() if "--json" in words else "\n".join(outcome.shown))
    return outcome.code


def require_environment() -> None:
    """Raises InvalidInput if an environment variable is invalid: the ranks of processes, flags, or the cache folder."""
    given = {name: os.environ[name] for name in PROCESS_VARIABLES if name in os.environ}
    are_numbers = all(re.fullmatch("[0-9]{1,9}", text) for text in given.values())
    if not are_numbers or 0 < int(given.get("RANK", 0)) >= int(given.get("WORLD_SIZE", 0)):
        raise InvalidInput(
            f"{' '.join(f'{name}={text!r}' for name, text in given.items())}: give numbers, RANK below WORLD_SIZE; "
            "launch with torchrun or accelerate, or unset them."
        )
    for name, meaning in (("ATTNRX_MEASURE", "never measure"), ("ATTNRX_BUILD", "no C++ kernels")):
        text = os.environ.get(name, "1")
        if text not in ("", "0", "1"):
            raise InvalidInput(f"{name}={text!r}: give 0 ({meaning}) or 1.")
    cache = os.environ.get("ATTNRX_CACHE")
    if cache and Path(cache).exists() and not Path(cache).is_dir():
        raise InvalidInput(f"ATTNRX_CACHE={cache!r} is not a folder; name a folder, or unset it.")


def require_out(arguments: Namespace, parser: Parser) -> None:
    """Raises InvalidInput if --out would overwrite an input, or a file of a kind that the command does not write.

    An existing file may only be replaced if attnrx wrote it, and if its `kind` is the kind of the command's output.
    """
    if getattr(arguments, "out", None) is None or not real_path(arguments.out).exists():
        return
    out = Path(arguments.out)
    for name, path in _inputs(arguments):
        # An input is overwritten if it is one of the files that the command replaces in its output folder. samefile
        # also detects links and other spellings of a path.
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

    # An exported model has its kind in a second file, FILE.json.
    found = file_kind(out) or file_kind(out.with_name(f"{out.name}.json"))
    if found != parser.kind:
        what = "a file that attnrx did not write" if found is None else f"an {found}"
        raise InvalidInput(f"--out {out} would replace {what} by an {parser.kind}; choose another file, or delete it.")


def _inputs(arguments: Namespace) -> Iterator[tuple[str, Path]]:
    """Yields the name and the path of every argument, other than --out, that is an existing file or folder."""
    for name, value in vars(arguments).items():
        for text in texts_of(value) if name != "out" else ():
            try:
                exists = bool(text) and Path(text).exists()
            except (OSError, ValueError):  # the text is too long for a name, or has a zero byte
                exists = False
            if exists:
                yield name, Path(text)


def parsed(words: Sequence[str]) -> tuple[Command, Parser, Namespace]:
    """Returns the command, its parser and its parsed arguments.

    Raises:
        UsageError: There is no such command.
    """
    name, rest = words[0], words[1:]
    if name not in COMMANDS:
        raise UsageError(f"attnrx has no command {name!r}: {nearest(name, COMMANDS)} See `attnrx --help`.")
    command = COMMANDS[name]
    parser = command.parser()
    return command, parser, parser.parse_args(rest)


def show_warning(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: object) -> None:
    """Logs attnrx's own warnings without a source location, and all other warnings in Python's format."""
    is_own = issubclass(category, ScaleWarning | CardWarning)
    # attnrx's own warnings are about the user's images and files, so the line of code does not help.
    text = f"attnrx: warning: {message}" if is_own else warnings.formatwarning(message, category, filename, lineno)
    log(text.rstrip())


def _report_error(words: list[str], error: BaseException, message: str, code: int) -> int:
    """Prints an error to stderr and, with --json, as a JSON object to stdout, and returns the code."""
    if code == DEFECT or "--debug" in words:
        traceback.print_exception(error)
    # Every process of a launcher prints, because the process that failed may not have rank 0.
    with suppress(OSError):  # the terminal was closed
        line = message if isinstance(error, KeyboardInterrupt) else f"attnrx: {message}"
        print(line, file=sys.stderr, flush=True)
    if "--json" in words and _is_first_process():
        print(json.dumps({"error": {"kind": type(error).__name__, "message": message, "exit_code": code}}, indent=2))
    return code


def _is_first_process() -> bool:
    """Returns whether this process has rank 0. Launchers set the rank in the variable RANK."""
    # torch would also return the rank, but importing torch takes seconds.
    return os.environ.get("RANK", "0") == "0"


def overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name.ljust(width)}  {command.summary}" for name, command in COMMANDS.items()]
    usage = "usage: attnrx COMMAND [options]      attnrx --version"
    purpose = "Prescriptions for attention: diagnose a Vision Transformer, prescribe, compress it, verify what it cost."
    return "\n".join([usage, "", purpose, "", "commands:", *lines, "", EPILOG.rstrip()])
