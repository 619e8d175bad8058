"""The spread of the strengths over the epochs, on which the effect of a retention ratio depends."""

from collections.abc import Sequence
from statistics import fmean

from attnrx.reports.numbers import MISSING, number
from attnrx_lab.papers.svda_experiment import SvdaRun

COLUMNS = {
    "removed": "% of directions that rho = 0.90 would remove",
    "effective_rank": "effective rank",
    "max_strength": "largest strength",
    "selectivity": "selectivity",
    "validation_accuracy": "validation accuracy",
}


def spread_over_epochs(runs: Sequence[SvdaRun]) -> str:
    """Returns a Markdown table with one line per epoch: means over layers, heads and runs of the same length."""
    lines = ["| epoch | " + " | ".join(COLUMNS.values()) + " |", "|" + "---|" * (len(COLUMNS) + 1)]
    for epochs in zip(*(run.record["epochs"] for run in runs), strict=True):
        cells = [_mean([epoch[name] for epoch in epochs]) for name in COLUMNS]
        lines.append(f"| {epochs[0]['epoch']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return number(fmean(known)) if known else MISSING
