"""Makes the table of a recipe: every run it needs, trained and measured, several side by side."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from attnrx.errors import InvalidInput, UnknownName
from attnrx.progress import Log, no_log
from attnrx.training import Reporter, Silent
from attnrx_lab.papers.experiment import Experiment, Run
from attnrx_lab.papers.recipe import RecipeFile, load_recipe
from attnrx_lab.papers.table import ReproducedTable, make_table


@dataclass(frozen=True)
class Request:
    """The requested part of a recipe and its changes; every difference from the paper is listed in the table.

    `only` names one scenario or several (a dataset, for the tables of SVDA). `seeds` replace the recipe's and `knobs`
    the settings of its protocol: each experiment lists its own, None means unchanged. `jobs` runs that many seeds side
    by side, each in its own process. Runs are stored in `FOLDER/KIND/SCENARIO/seed-SEED`, are shared by all recipes,
    and continue after an interruption.
    """

    only: str | Sequence[str] | None = None
    seeds: tuple[int, ...] | None = None
    tiny: bool = False
    folder: str | Path = "runs"
    jobs: int = 1
    knobs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        seeds = self.seeds
        if self.jobs < 1 or (seeds is not None and (not seeds or len(set(seeds)) != len(seeds))):
            raise InvalidInput(f"seeds={self.seeds}, jobs={self.jobs}: give at least one seed, each once, and one job.")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "Request":
        """Parses options by name: those that are no field of a request are settings of the experiment."""
        own = {each.name for each in fields(cls)} - {"knobs"}
        knobs = {name: value for name, value in options.items() if name not in own}
        return cls(**{name: value for name, value in options.items() if name in own}, knobs=knobs)

    def experiment(self, protocol: Experiment, seed: int) -> Experiment:
        """The protocol's experiment for one seed, changed as requested."""
        own = protocol.seeded(seed).here()
        changes = {name: value for name, value in self.knobs.items() if value is not None}
        return (own.as_tiny() if self.tiny else own).changed(changes)

    def place(self, experiment: Experiment) -> Path:
        return Path(self.folder) / experiment.place


def reproduce(name: str, *, reporter: Reporter | None = None, log: Log = no_log, **options: Any) -> ReproducedTable:
    """Makes a recipe's table, training where necessary; `options` are the fields of `Request`, and settings.

    The table is also saved as NAME.json and NAME.md in the folder of the runs, with NAME.html if there are
    pictures. Progress goes to `log` and to the training `reporter`; side by side, runs report their stages only.
    """
    file, request = load_recipe(name), Request.of(options)
    protocols = _chosen(file, request)
    seeds = request.seeds or file.recipe.seeds
    requested = [(protocol, request.experiment(protocol, seed)) for protocol in protocols for seed in seeds]
    runs = _run_all([experiment for _, experiment in requested], request, reporter, log)
    by_scenario = {
        protocol.scenario: [run for run in runs if run.experiment.scenario == protocol.scenario]
        for protocol in protocols
    }
    same_shapes = request.knobs.get("model") is None
    table = make_table(file, by_scenario, _deviations(file, requested), same_shapes)
    table.save(request.folder)
    return table


def _chosen(file: RecipeFile, request: Request) -> list[Experiment]:
    known = [protocol.scenario for protocol in file.recipe.protocol]
    wanted = (request.only,) if isinstance(request.only, str) else request.only or known
    for scenario in wanted:
        if scenario not in known:
            raise UnknownName(f"scenario of the recipe {file.name}", scenario, known)
    return [protocol for protocol in file.recipe.protocol if protocol.scenario in wanted]


def _run_all(wanted: list[Experiment], request: Request, reporter: Reporter | None, log: Log) -> list[Run]:
    if request.jobs == 1 or len(wanted) == 1:
        return [each.run(request.place(each), reporter=reporter, log=log) for each in wanted]
    threads = max(1, (os.cpu_count() or 1) // request.jobs)
    # Spawned, not forked: a forked process may inherit locked thread pools.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(request.jobs, mp_context=context, initializer=partial(_alone, threads)) as pool:
        started = {pool.submit(_run_quietly, each, request.place(each)): each for each in wanted}
        log(f"{len(wanted)} runs, {request.jobs} side by side with {threads} threads each")
        try:
            for done in as_completed(started):
                done.result()
                log(f"{started[done].name}: done, {request.place(started[done])}")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [each.load(request.place(each)) for each in wanted]


def _alone(threads: int) -> None:
    torch.set_num_threads(threads)
    threading.Thread(target=_stop_when_orphaned, daemon=True).start()


def _stop_when_orphaned() -> None:
    """Stops this process, as Ctrl-C does, when its parent process ends for any reason."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)  # a training saves a checkpoint first


def _run_quietly(experiment: Experiment, folder: Path) -> None:
    parent = multiprocessing.parent_process()
    try:
        experiment.run(folder, reporter=Silent())
    finally:
        if parent is not None and not parent.is_alive():
            os._exit(1)  # the queue may hold more runs, which no process waits for


def _deviations(file: RecipeFile, requested: Sequence[tuple[Experiment, Experiment]]) -> dict[str, list[str]]:
    """Returns by scenario the settings and seeds that differ from the protocol."""
    found: dict[str, list[str]] = {}
    for protocol, experiment in requested:
        found.setdefault(protocol.scenario, []).extend(experiment.deviations(protocol))
    seeds, usual = {experiment.seed for _, experiment in requested}, file.recipe.seeds
    other = [f"seeds {', '.join(map(str, sorted(seeds)))} instead of {', '.join(map(str, usual))}"]
    # Each seed of a scenario repeats its deviations.
    return {name: list(dict.fromkeys(texts + other * (seeds != set(usual)))) for name, texts in found.items()}
