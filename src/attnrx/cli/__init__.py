"""The command line of attnrx. Every command loads its inputs from files, and writes its results to files."""

from attnrx.cli.main import main

__all__ = ["main"]
