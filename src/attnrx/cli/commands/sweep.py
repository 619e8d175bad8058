"""attnrx sweep: one command over seeds, datasets and rules; every number of every job in one results store."""

from argparse import Namespace
from typing import Any

import attnrx as rx
from attnrx.cli.options import NOT_NEGATIVE, THREADS
from attnrx.cli.outcome import Outcome, Say
from attnrx.cli.parser import Parser
from attnrx.cli.sweep_results import add_results, show_results, show_status
from attnrx.errors import InvalidInput

EXAMPLE = "attnrx sweep run sweep.toml --store results.sqlite --workers 2"
ACTIONS = ("run", "status", "results")
FAILED = 1


def add(parser: Parser) -> None:
    """Declares the options."""
    parser.add_argument("action", choices=ACTIONS, help="run the jobs, say how they stand, or show their numbers")
    parser.add_argument(
        "place",
        nargs="?",
        metavar="FILE",
        help="run: TOML or JSON with `command`, in which {AXIS} stands for a value and {out} for a folder of the job, "
        "and [grid], whose axes are lists of values, or tables of names and values; status, results: the store",
    )
    parser.add_argument("--store", metavar="FILE", help="the results store, an SQLite file on a disk of this machine")
    run = parser.add_argument_group("run")
    run.add_argument("--command", metavar="TEXT", help="the command, instead of a file: 'compare {model} ...'")
    run.add_argument(
        "--over", action="append", default=[], metavar="AXIS=V,V", help="an axis, with --command; may be repeated"
    )
    run.add_argument("--engine", choices=("processes", "ray"), default="processes", help="(processes)")
    run.add_argument("--workers", type=THREADS, default=1, metavar="N", help="jobs side by side (1)")
    run.add_argument("--threads", type=THREADS, metavar="N", help="CPU threads of a job (an even share)")
    run.add_argument("--gpus", type=NOT_NEGATIVE, default=0.0, metavar="X", help="GPUs of a job, with ray (0)")
    run.add_argument("--retry", action="store_true", help="run failed jobs again, too")
    add_results(parser)


def run(arguments: Namespace, say: Say) -> Outcome:
    """Runs, or shows."""
    if arguments.action == "run":
        return _run(arguments, say)
    place = arguments.place or arguments.store
    if place is None:
        raise InvalidInput(f"sweep {arguments.action} shows a results store; name its file.")
    store = rx.results.Store(place, create=False)
    return show_status(store) if arguments.action == "status" else show_results(store, arguments)


def _run(arguments: Namespace, say: Say) -> Outcome:
    from attnrx.cli.jobs import PRELOAD, answer, require_command

    if arguments.store is None:
        raise InvalidInput("sweep run keeps its results in a file: give --store FILE.")
    sweep = _sweep(arguments)
    for job in () if sweep is None else sweep.jobs:
        require_command(job.words)
    threads = arguments.threads or rx.sweeps.threads_each(arguments.workers)
    knobs: dict[str, Any] = {"gpus": arguments.gpus, "preload": PRELOAD}
    engine = rx.sweeps.make_engine(arguments.engine, answer, arguments.workers, threads, **knobs)
    # Without a sweep, what waits in an existing store goes on; the store is created last, when nothing can be refused.
    store = rx.results.Store(arguments.store, create=sweep is not None)
    if sweep is not None:
        known = len(sweep.jobs)
        say(f"{known} jobs, {store.add(sweep.jobs)} of them new to {arguments.store}")
    if arguments.retry:
        say(f"{store.retry()} failed jobs wait again")
    counts = rx.sweeps.run_jobs(store, engine, threads, say)
    shown = show_status(store)
    return Outcome(shown.record, shown.shown, code=FAILED if counts["failed"] else 0)


def _sweep(arguments: Namespace) -> "rx.sweeps.Sweep | None":
    """Reads what is to be run; with a store alone, what is in it goes on."""
    if arguments.command is None:
        if arguments.over:
            raise InvalidInput(f"--over {arguments.over[0]} is an axis of --command; give that too, or use a file.")
        return None if arguments.place is None else rx.sweeps.Sweep.load(arguments.place)
    if arguments.place is not None:
        raise InvalidInput(f"{arguments.place} and --command are both sweeps; give one of them.")
    return rx.sweeps.Sweep.of(arguments.command, dict(_axis(text) for text in arguments.over))


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
