"""Sweeps: one command over a grid of values, run side by side, stored in a folder, never run twice."""

from attnrx_lab.sweeps.jobs import COLUMNS, Job, Label, grid_jobs, load_jobs
from attnrx_lab.sweeps.store import JobState, SweepStore, run_jobs
from attnrx_lab.sweeps.summary import Mean, Result, means_table, over_seeds, rows_of

__all__ = [
    "COLUMNS",
    "Job",
    "JobState",
    "Label",
    "Mean",
    "Result",
    "SweepStore",
    "grid_jobs",
    "load_jobs",
    "means_table",
    "over_seeds",
    "rows_of",
    "run_jobs",
]
