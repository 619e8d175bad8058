"""The command line; the inputs and outputs of every command are files."""

from attnrx.cli.main import main

__all__ = ["main"]
