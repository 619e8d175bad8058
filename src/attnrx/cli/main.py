"""The entry point: finds the command, runs it, and turns what happened into an exit code."""

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and gives its exit code."""
    return 2
