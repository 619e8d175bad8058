"""Sweeps: one command over a grid of values, run side by side, stored by Optuna, never run twice."""

from attnrx_lab.sweeps.jobs import COLUMNS, Job, Label, grid_jobs, load_jobs
from attnrx_lab.sweeps.study import JobState, SweepStudy, run_jobs
from attnrx_lab.sweeps.summary import Mean, Result, means_table, over_seeds, rows_of

__all__ = [
    "COLUMNS",
    "Job",
    "JobState",
    "Label",
    "Mean",
    "Result",
    "SweepStudy",
    "grid_jobs",
    "load_jobs",
    "means_table",
    "over_seeds",
    "rows_of",
    "run_jobs",
]
