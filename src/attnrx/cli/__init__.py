"""The command line, in which every command takes files and writes files."""

from attnrx.cli.main import main

__all__ = ["main"]
