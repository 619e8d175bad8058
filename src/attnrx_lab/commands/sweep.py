"""attnrx sweep: one command over seeds, datasets and rules; every number of every job in one Optuna storage."""

from argparse import Namespace
from typing import TYPE_CHECKING, Any

from attnrx.cli.options import THREADS
from attnrx.cli.outcome import Outcome
from attnrx.cli.parser import Parser
from attnrx.errors import InvalidInput
from attnrx.progress import Log
from attnrx_lab.commands.sweep_results import add_results, show_results, show_status

if TYPE_CHECKING:
    from attnrx_lab.sweeps import Sweep

SUMMARY = "run one command over seeds, datasets and rules, and keep every number"
EXAMPLE = "attnrx sweep run sweep.toml --store results.sqlite --workers 2"
ACTIONS = ("run", "status", "results")
FAILED = 1


def add(parser: Parser) -> None:
    """Declares the options."""
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
    from attnrx_lab.commands.jobs import PRELOAD, require_command, run_command
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
