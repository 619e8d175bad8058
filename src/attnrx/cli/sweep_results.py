"""What a results store holds, as tables for people and files for other programs."""

import csv
import io
from argparse import Namespace
from typing import Any

import attnrx as rx
from attnrx.cli.outcome import Outcome, Table
from attnrx.cli.parser import Parser

FORMULA = ("=", "+", "-", "@", "\t", "\r")
FORMATS = ("table", "markdown", "csv")
ERROR_SHOWN = 100  # characters of an error in the table of jobs


def add_results(parser: Parser) -> None:
    """Adds how numbers are shown."""
    shown = parser.add_argument_group("results")
    shown.add_argument("--format", choices=FORMATS, default="table", help="csv holds every run, the others means")
    shown.add_argument("--out", metavar="FILE", help="write it there instead")


def show_status(store: "rx.results.Store") -> Outcome:
    """Gives every job and how it stands."""
    entries = store.entries()
    rows = tuple(
        (
            " ".join(f"{name}={value}" for name, value in entry.job.labels.items()) or " ".join(entry.job.words),
            entry.status,
            str(entry.attempts),
            "" if entry.seconds is None else f"{entry.seconds:.1f}",
            (entry.error or "").partition("\n")[0][:ERROR_SHOWN],
        )
        for entry in entries
    )
    counts = store.counts()
    jobs = [
        {
            "id": entry.job.id,
            "words": list(entry.job.words),
            "labels": dict(entry.job.labels),
            **{name: getattr(entry, name) for name in ("status", "attempts", "started", "seconds", "host", "error")},
            "versions": dict(entry.versions),
        }
        for entry in entries
    ]
    told = ", ".join(f"{count} {state}" for state, count in counts.items())
    table = Table(("job", "status", "attempts", "seconds", "error"), rows)
    return Outcome({"store": str(store.path), "counts": counts, "jobs": jobs}, (table, told))


def show_results(store: "rx.results.Store", arguments: Namespace) -> Outcome:
    """Gives the numbers over their seeds, or every one."""
    found = rx.reports.SweepRecord.load(store.path)
    columns, rows = found.table()
    text = {"markdown": found.to_markdown, "csv": lambda: every_number(store)}.get(arguments.format)
    record = {
        "store": str(store.path),
        "means": [{**vars(mean), "labels": dict(mean.labels)} for mean in found.means],
    }
    if arguments.out is not None:
        path = rx.storage.write_text(arguments.out, (text or found.to_markdown)())
        return Outcome({**record, "out": str(path)}, (f"results: {path}",))
    return Outcome(record, (text().rstrip("\n") if text else Table(columns, tuple(rows)),))


def every_number(store: "rx.results.Store") -> str:
    """Gives one line of CSV for every number of every run."""
    results = store.results()
    labels = list(dict.fromkeys(name for result in results for name in result.labels))
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow([*map(_cell, labels), "metric", "value", "low", "high", "n", "unit"])
    for result in results:
        told = [result.labels.get(name) for name in labels]
        row = [*told, result.metric, result.value, result.low, result.high, result.n, result.unit]
        writer.writerow(map(_cell, row))
    return lines.getvalue()


def _cell(value: Any) -> Any:
    """A cell that spreadsheets do not take for a formula: texts that begin like one get an apostrophe before them."""
    return f"'{value}" if isinstance(value, str) and value[:1] in FORMULA else value
