"""attnrx sweep: one command over seeds, datasets and rules; every number of every job in one Optuna storage."""

import csv
import io
import sys
import traceback
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attnrx as rx
from attnrx.cli.main import BAD_INPUT, outcome_of, parsed
from attnrx.cli.options import THREADS
from attnrx.cli.outcome import Outcome, Table
from attnrx.cli.parser import Parser
from attnrx.errors import AttnrxError, InvalidInput
from attnrx.progress import Log

if TYPE_CHECKING:
    from attnrx_lab.sweeps import Sweep, SweepStudy


FORMULA = ("=", "+", "-", "@", "\t", "\r")
FORMATS = ("table", "markdown", "csv")
ERROR_SHOWN = 100  # characters of an error in the table of jobs


def add_results(parser: Parser) -> None:
    """Adds the options that select and format the numbers."""
    shown = parser.add_argument_group("results")
    shown.add_argument("--format", choices=FORMATS, default="table", help="csv holds every run, the others means")
    shown.add_argument("--out", metavar="FILE", help="write it there instead")


def show_status(study: "SweepStudy") -> Outcome:
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


PRELOAD = ("attnrx_lab.commands.sweep", "attnrx.api", "attnrx.training", "attnrx_lab.comparison")


def run_command(words: tuple[str, ...], threads: int) -> dict[str, Any]:
    """Runs a command with this many CPU threads and returns its record, also if a claim in it fails.

    Raises:
        AttnrxError: The command failed, or has no record of numbers.
    """
    import torch

    torch.set_num_threads(threads)
    print(f"attnrx {' '.join(words)}", file=sys.stderr, flush=True)
    try:
        outcome = outcome_of([*words, "--json"], _say)
    except SystemExit as stop:  # argparse, after --help
        raise InvalidInput(f"attnrx {' '.join(words)} ended with {stop.code} and gave no record.") from None
    except Exception:
        traceback.print_exc()
        raise
    if outcome.code >= BAD_INPUT:
        raise AttnrxError(f"the command ended with exit code {outcome.code}.")
    return dict(outcome.record)


def require_command(words: Sequence[str]) -> None:
    """Raises InvalidInput for words that no command accepts, before any job runs."""
    try:
        parsed(words)
    except SystemExit:  # argparse, after --help
        raise InvalidInput(f"attnrx {' '.join(words)} shows help; give a command that computes numbers.") from None


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


SUMMARY = "run one command over seeds, datasets and rules, and keep every number"
EXAMPLE = "attnrx sweep run sweep.toml --store results.sqlite --workers 2"
ACTIONS = ("run", "status", "results")
FAILED = 1


def add(parser: Parser) -> None:
    parser.add_argument("action", choices=ACTIONS, help="run the jobs, show their states, or show their numbers")
    parser.add_argument(
        "place",
        nargs="?",
        metavar="FILE",
        help="run: TOML or JSON with `command`, in which {AXIS} stands for a value and {out} for a folder of the job, "
        "and [grid], whose axes are lists of values, or tables of names and values; status, results: the store",
    )
    parser.add_argument(
        "--store",
        metavar="FILE",
        help="an SQLite file on a disk of this machine, or the URL of a database, for optuna-dashboard too",
    )
    run = parser.add_argument_group("run")
    run.add_argument("--command", metavar="TEXT", help="the command, instead of a file: 'compare {model} ...'")
    run.add_argument(
        "--over", action="append", default=[], metavar="AXIS=V,V", help="an axis, with --command; may be repeated"
    )
    run.add_argument("--workers", type=THREADS, default=1, metavar="N", help="jobs side by side (1)")
    run.add_argument("--threads", type=THREADS, metavar="N", help="CPU threads of a job (an even share)")
    run.add_argument("--retry", action="store_true", help="run failed jobs again, too")
    add_results(parser)


def run(arguments: Namespace, log: Log) -> Outcome:
    """Runs the jobs, or shows the jobs or the results."""
    from attnrx_lab.sweeps import SweepStudy

    if arguments.action == "run":
        return _run(arguments, log)
    place = arguments.place or arguments.store
    if place is None:
        raise InvalidInput(f"sweep {arguments.action} shows the storage of a sweep; name its file.")
    study = SweepStudy(place, create=False)
    return show_status(study) if arguments.action == "status" else show_results(study, arguments)


def _run(arguments: Namespace, log: Log) -> Outcome:
    from attnrx_lab.sweeps import JobWorkers, SweepStudy, threads_each

    if arguments.store is None:
        raise InvalidInput("sweep run keeps its results in a file: give --store FILE.")
    sweep = _sweep(arguments)
    for job in () if sweep is None else sweep.jobs:
        require_command(job.words)
    threads = arguments.threads or threads_each(arguments.workers)
    # Without a sweep, the waiting jobs of an existing storage are run; a new storage is created last, after all checks.
    study = SweepStudy(arguments.store, create=sweep is not None)
    if sweep is not None:
        log(f"{len(sweep.jobs)} jobs, {study.add(sweep.jobs)} of them new to {arguments.store}")
    if arguments.retry:
        log(f"{study.requeue_failed()} failed jobs wait again")
    counts = JobWorkers(study, run_command, arguments.workers, threads, PRELOAD).run(log)
    status = show_status(study)
    return Outcome(status.record, status.shown, code=FAILED if counts["failed"] else 0)


def _sweep(arguments: Namespace) -> "Sweep | None":
    """Returns the sweep to run; with a storage alone, its waiting jobs are run."""
    from attnrx_lab.sweeps import Sweep

    if arguments.command is None:
        if arguments.over:
            raise InvalidInput(f"--over {arguments.over[0]} is an axis of --command; give that too, or use a file.")
        return None if arguments.place is None else Sweep.load(arguments.place)
    if arguments.place is not None:
        raise InvalidInput(f"{arguments.place} and --command are both sweeps; give one of them.")
    return Sweep.of(arguments.command, dict(_axis(text) for text in arguments.over))


def _axis(text: str) -> tuple[str, list[Any]]:
    name, equals, values = text.partition("=")
    if not name or not equals or not values:
        raise InvalidInput(f"--over {text!r}: give AXIS=VALUE,VALUE, e.g. seed=0,1,2.")
    return name, [_value(value) for value in values.split(",")]


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
