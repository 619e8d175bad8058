"""This machine: its processes, subprocesses and stored measurements."""
