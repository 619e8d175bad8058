"""This machine: its processes, subprocesses and stored measurements."""

from attnrx.runtime import processes

__all__ = ["processes"]
