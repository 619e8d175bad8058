"""A command as a job of a sweep: its words in, its record out, what it says into the log of the job."""

import sys
import traceback
from collections.abc import Sequence
from typing import Any

from attnrx.cli.main import BAD_INPUT, outcome_of, parsed
from attnrx.errors import AttnrxError, InvalidInput
from attnrx.sweeps import Task

PRELOAD = ("attnrx.cli.jobs", "attnrx.flow", "attnrx.experiments")


def answer(task: Task) -> dict[str, Any]:
    """Runs the command of a task and gives its record; one that a claim does not hold in is done all the same.

    Raises:
        AttnrxError: The command refused, or is none that gives numbers.
    """
    import torch

    torch.set_num_threads(task.threads)
    print(f"attnrx {' '.join(task.words)}", file=sys.stderr, flush=True)
    try:
        outcome = outcome_of([*task.words, "--json"], _say)
    except SystemExit as stop:  # argparse, after --help
        raise InvalidInput(f"attnrx {' '.join(task.words)} ended with {stop.code} and gave no record.") from None
    except Exception:
        traceback.print_exc()
        raise
    if outcome.code >= BAD_INPUT:
        raise AttnrxError(f"the command ended with exit code {outcome.code}.")
    return dict(outcome.record)


def require_command(words: Sequence[str]) -> None:
    """Raises InvalidInput for words that no command takes, before any job runs."""
    try:
        parsed(words)
    except SystemExit:  # argparse, after --help
        raise InvalidInput(f"attnrx {' '.join(words)} shows help; give a command that computes numbers.") from None


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
