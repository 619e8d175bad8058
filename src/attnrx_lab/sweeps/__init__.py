"""Sweeps: one command over a grid of values, run side by side, stored by Optuna, never run twice."""

from attnrx_lab.sweeps.grid import Job, Label, Result, Sweep
from attnrx_lab.sweeps.study import JobState, SweepStudy
from attnrx_lab.sweeps.summary import Mean, SweepSummary, over_seeds, rows_of
from attnrx_lab.sweeps.workers import JobWorkers, threads_each

__all__ = [
    "Job",
    "JobState",
    "JobWorkers",
    "Label",
    "Mean",
    "Result",
    "Sweep",
    "SweepStudy",
    "SweepSummary",
    "over_seeds",
    "rows_of",
    "threads_each",
]
