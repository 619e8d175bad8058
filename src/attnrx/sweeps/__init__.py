"""Sweeps: many commands that differ in a few words, run side by side, kept in one results store, never run twice."""

from attnrx.sweeps.engine import Engine, Task, Work
from attnrx.sweeps.engines import ENGINES, make_engine, threads_each
from attnrx.sweeps.grid import Sweep
from attnrx.sweeps.rows import rows_of
from attnrx.sweeps.running import run_jobs

__all__ = ["ENGINES", "Engine", "Sweep", "Task", "Work", "make_engine", "rows_of", "run_jobs", "threads_each"]
