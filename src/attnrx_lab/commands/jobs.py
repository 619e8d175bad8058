"""Runs a command of attnrx as the job of a sweep."""

import sys
import traceback
from collections.abc import Sequence
from typing import Any

from attnrx.cli.main import BAD_INPUT, outcome_of, parsed
from attnrx.errors import AttnrxError, InvalidInput

PRELOAD = ("attnrx_lab.commands.jobs", "attnrx.api", "attnrx.training", "attnrx_lab.comparison")


def run_command(words: tuple[str, ...], threads: int) -> dict[str, Any]:
    """Runs a command with this many CPU threads and returns its record, also if a claim in it fails.

    Raises:
        AttnrxError: The command failed, or has no record of numbers.
    """
    import torch

    torch.set_num_threads(threads)
    print(f"attnrx {' '.join(words)}", file=sys.stderr, flush=True)
    try:
        outcome = outcome_of([*words, "--json"], _say)
    except SystemExit as stop:  # argparse, after --help
        raise InvalidInput(f"attnrx {' '.join(words)} ended with {stop.code} and gave no record.") from None
    except Exception:
        traceback.print_exc()
        raise
    if outcome.code >= BAD_INPUT:
        raise AttnrxError(f"the command ended with exit code {outcome.code}.")
    return dict(outcome.record)


def require_command(words: Sequence[str]) -> None:
    """Raises InvalidInput for words that no command accepts, before any job runs."""
    try:
        parsed(words)
    except SystemExit:  # argparse, after --help
        raise InvalidInput(f"attnrx {' '.join(words)} shows help; give a command that computes numbers.") from None


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
