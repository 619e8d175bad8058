"""The command line: every verb a command, whose inputs and outputs are files."""

from attnrx.cli.main import main

__all__ = ["main"]
