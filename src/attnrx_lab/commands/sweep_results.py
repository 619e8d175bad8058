"""The jobs and results of a sweep as tables and files."""

import csv
import io
from argparse import Namespace
from typing import TYPE_CHECKING, Any

import attnrx as rx
from attnrx.cli.outcome import Outcome, Table
from attnrx.cli.parser import Parser

if TYPE_CHECKING:
    from attnrx_lab.sweeps import SweepStudy

FORMULA = ("=", "+", "-", "@", "\t", "\r")
FORMATS = ("table", "markdown", "csv")
ERROR_SHOWN = 100  # characters of an error in the table of jobs


def add_results(parser: Parser) -> None:
    """Adds the options that select and format the numbers."""
    shown = parser.add_argument_group("results")
    shown.add_argument("--format", choices=FORMATS, default="table", help="csv holds every run, the others means")
    shown.add_argument("--out", metavar="FILE", help="write it there instead")


def show_status(study: "SweepStudy") -> Outcome:
    """Returns every job with its state."""
    states = study.states()
    rows = tuple(
        (
            state.job.title,
            state.state,
            str(state.attempts),
            "" if state.seconds is None else f"{state.seconds:.1f}",
            (state.error or "").partition("\n")[0][:ERROR_SHOWN],
        )
        for state in states
    )
    jobs = [
        {
            "id": state.job.id,
            "words": list(state.job.words),
            "labels": dict(state.job.labels),
            **{name: getattr(state, name) for name in ("state", "attempts", "seconds", "host", "error", "versions")},
        }
        for state in states
    ]
    counts = study.counts()
    total = ", ".join(f"{count} {state}" for state, count in counts.items())
    table = Table(("job", "state", "attempts", "seconds", "error"), rows)
    return Outcome({"store": study.place, "counts": counts, "jobs": jobs}, (table, total))


def show_results(study: "SweepStudy", arguments: Namespace) -> Outcome:
    """Returns the numbers averaged over their seeds, or all of them."""
    from attnrx_lab.sweeps import SweepSummary

    summary = SweepSummary.of(study)
    columns, rows = summary.table()
    text = {"markdown": summary.to_markdown, "csv": lambda: results_csv(study)}.get(arguments.format)
    record = {
        "store": study.place,
        "means": [{**vars(mean), "labels": dict(mean.labels)} for mean in summary.means],
    }
    if arguments.out is not None:
        path = rx.serialization.write_text(arguments.out, (text or summary.to_markdown)())
        return Outcome({**record, "out": str(path)}, (f"results: {path}",))
    return Outcome(record, (text().rstrip("\n") if text else Table(columns, tuple(rows)),))


def results_csv(study: "SweepStudy") -> str:
    """Returns one line of CSV for every number of every job."""
    results = study.results()
    labels = list(dict.fromkeys(name for result in results for name in result.labels))
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow([*map(_cell, labels), "metric", "value", "low", "high", "n", "unit"])
    for result in results:
        values = [result.labels.get(name) for name in labels]
        row = [*values, result.metric, result.value, result.low, result.high, result.n, result.unit]
        writer.writerow(map(_cell, row))
    return lines.getvalue()


def _cell(value: Any) -> Any:
    """Returns a cell that spreadsheets do not take for a formula: such texts get a leading apostrophe."""
    return f"'{value}" if isinstance(value, str) and value[:1] in FORMULA else value
