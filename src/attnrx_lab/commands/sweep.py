"""attnrx sweep: one command over seeds, datasets and rules; every number of every job in one folder."""

import os
import sys
from argparse import Namespace
from typing import Any

import attnrx as rx
from attnrx.cli.main import BAD_INPUT, outcome_of, parsed
from attnrx.cli.main import log as to_stderr
from attnrx.cli.options import THREADS, option
from attnrx.cli.outcome import Outcome, Table
from attnrx.cli.parser import Parser
from attnrx.support.errors import AttnrxError, CheckpointError, InvalidInput
from attnrx.support.progress import Log
from attnrx.support.tables import csv_text

SUMMARY = "run one command over seeds, datasets and rules, and keep every number"
EXAMPLE = "attnrx sweep run sweep.toml --store results --workers 2"
ACTIONS = ("run", "status", "results")
ERROR_SHOWN = 100  # characters of an error in the table of jobs


def add(parser: Parser) -> None:
    parser.add_argument("action", choices=ACTIONS, help="run the jobs, show their states, or show their numbers")
    parser.add_argument(
        "place",
        metavar="FILE",
        help="run: TOML with `command`, whose jobs alone are run, in which {AXIS} stands for a "
        "value and {out} for a folder of the job, and "
        "[grid], whose axes are lists of values, or tables of names and values (quote '{AXIS}' if they have spaces); "
        "status, results: the store",
    )
    run = parser.add_argument_group("run")
    option(run, "--store", "FOLDER", "the folder of the jobs with their numbers and output")
    option(run, "--workers", THREADS, "jobs side by side", 1)
    option(run, "--threads", THREADS, "CPU threads of a job (an even share)")
    option(run, "--retry", bool, "run failed jobs again, too")
    option(run, "--trust", bool, "run commands with --trust")
    results = parser.add_argument_group("results")
    option(results, "--csv", "FILE", "also write every number of every run there")


def run(arguments: Namespace, log: Log) -> Outcome:
    """Runs the jobs, or shows the jobs or the results."""
    from attnrx_lab.sweeps import SweepStore

    if arguments.action == "run":
        return _run(arguments, log)
    store = SweepStore(arguments.place, create=False)
    return _status(store) if arguments.action == "status" else _results(store, arguments.csv)


def _run(arguments: Namespace, log: Log) -> Outcome:
    from attnrx_lab.sweeps import SweepStore, load_jobs, run_jobs

    if arguments.store is None:
        raise InvalidInput("sweep run keeps its results in a folder: give --store FOLDER.")
    jobs = load_jobs(arguments.place)
    for job in jobs:  # words that no command accepts are refused before any job runs
        try:
            trusts = getattr(parsed(job.words)[-1], "trust", False)
        except SystemExit:  # argparse, after --help
            raise InvalidInput(f"{job.title} shows help; give a command that computes numbers.") from None
        if trusts and not arguments.trust:
            raise InvalidInput(
                f"{arguments.place} has commands with --trust, which run code of the files that they open: add --trust "
                "to this command if you trust their origin."
            )
    store = SweepStore(arguments.store)
    log(f"{len(jobs)} jobs, {store.add(jobs)} of them new to {arguments.store}")
    # An even share of the processors, so that jobs side by side do not compete for them.
    threads = arguments.threads or max(1, (os.cpu_count() or 1) // arguments.workers)
    run_jobs(store, jobs, run_command, arguments.workers, threads, log, arguments.retry)
    return _status(store, code=1 if any(store.state(job).error is not None for job in jobs) else 0)


def run_command(words: tuple[str, ...], threads: int) -> dict[str, Any]:
    """Runs a command with this many CPU threads and returns its record, also if a claim in it fails."""
    import torch

    torch.set_num_threads(threads)
    print(f"attnrx {' '.join(words)}", file=sys.stderr, flush=True)
    outcome = outcome_of([*words, "--json"], to_stderr)
    # A claim that fails (code 1) is a result; only a command without a result is a failed job.
    if outcome.code >= BAD_INPUT:
        raise AttnrxError(f"the command ended with exit code {outcome.code}.")
    return dict(outcome.record)


def _status(store: Any, code: int = 0) -> Outcome:
    rows, jobs = [], []
    for state in store.states():
        seconds = "" if state.seconds is None else f"{state.seconds:.1f}"
        error = (state.error or "").partition("\n")[0][:ERROR_SHOWN]
        rows.append((state.job.title, state.state, seconds, error))
        job = {"id": state.job.id, "words": list(state.job.words), "labels": dict(state.job.labels)}
        jobs.append({**job, "state": state.state, "seconds": state.seconds, "error": state.error})
    counts = store.counts()
    total = ", ".join(f"{count} {state}" for state, count in counts.items())
    table = Table(("job", "state", "seconds", "error"), tuple(rows))
    return Outcome({"store": str(store.folder), "counts": counts, "jobs": jobs}, (table, total), code)


def _results(store: Any, path: str | None) -> Outcome:
    """Returns the numbers averaged over their seeds; all of them go to the file."""
    from attnrx_lab.sweeps import COLUMNS, means_table, over_seeds

    results = store.results()
    if not results:
        raise CheckpointError(f"{store.folder} holds no number yet ({store.counts()}); let `attnrx sweep run` go on.")
    means = over_seeds(results)
    record = {"store": str(store.folder), "means": [{**vars(mean), "labels": dict(mean.labels)} for mean in means]}
    shown: list[Table | str] = [Table(*means_table(means))]
    if path is not None:
        # Jobs may have different axes, so the columns are those of any result.
        labels = dict.fromkeys(name for result in results for name in result.labels)
        columns, rows = [*labels, *COLUMNS], [vars(result) | dict(result.labels) for result in results]
        table = csv_text(columns, [[row.get(name) for name in columns] for row in rows])
        shown.append(f"results: {rx.serialization.write_text(path, table)}")
    return Outcome(record, tuple(shown))
