"""From the name of a recipe to its table: every run it needs, trained and measured, several side by side."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from attnrx.errors import InvalidInput, UnknownName
from attnrx.experiments.bench import Say, in_silence
from attnrx.experiments.experiment import SvdaExperiment
from attnrx.experiments.recipe import RecipeFile, load_recipe
from attnrx.experiments.svda import SvdaRun, run_svda
from attnrx.experiments.table import ReproducedTable, make_table
from attnrx.training import Reporter, Silent

SEEDS = (42, 43, 44)
REPLACED = ("epochs", "draws", "test_images", "control_images", "control_kinds")  # knobs of the experiment


@dataclass(frozen=True)
class Request:
    """What of a recipe is wanted, and how it may differ from the paper; every difference is told in the table.

    `only` names one dataset or several. `epochs`, `draws`, `test_images`, `control_images` and `control_kinds` replace
    the protocol's.
    `jobs` runs that many seeds side by side, each in a process of its own. Runs live in
    `FOLDER/svda/DATASET/seed-SEED`, are shared by all recipes, and go on where they were stopped.
    """

    only: str | Sequence[str] | None = None
    seeds: tuple[int, ...] = SEEDS
    tiny: bool = False
    epochs: int | None = None
    folder: str | Path = "runs"
    jobs: int = 1
    draws: int | None = None
    test_images: int | None = None
    control_images: int | None = None
    control_kinds: tuple[str, ...] | None = None

    def __post_init__(self):
        if not self.seeds or self.jobs < 1 or len(set(self.seeds)) != len(self.seeds):
            raise InvalidInput(f"seeds={self.seeds}, jobs={self.jobs}: give at least one seed, each once, and one job.")

    @property
    def datasets(self) -> tuple[str, ...]:
        """The datasets asked for; empty for all."""
        if self.only is None:
            return ()
        return (self.only,) if isinstance(self.only, str) else tuple(self.only)

    def experiment(self, protocol: SvdaExperiment, seed: int) -> SvdaExperiment:
        """The protocol's experiment for one seed, changed as asked."""
        asked = {name: getattr(self, name) for name in REPLACED}
        changes: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
        own = replace(protocol, seed=seed, compile=torch.cuda.is_available())
        return replace(own.as_tiny() if self.tiny else own, **changes)

    def place(self, experiment: SvdaExperiment) -> Path:
        """The folder of one run."""
        dataset = f"{experiment.dataset}-tiny" if experiment.tiny else experiment.dataset
        return Path(self.folder) / "svda" / dataset / f"seed-{experiment.seed}"


def reproduce(name: str, *, reporter: Reporter | None = None, say: Say = in_silence, **options: Any) -> ReproducedTable:
    """Makes a recipe's table, training what is not trained yet; `options` are the fields of `Request`.

    The table is also saved as NAME.json and NAME.md in the folder of the runs. Progress goes to `say` and to the
    training `reporter`; side by side, runs report their stages only.
    """
    file, request = load_recipe(name), Request(**options)
    protocols = _chosen(file, request)
    wanted = [request.experiment(protocol, seed) for protocol in protocols for seed in request.seeds]
    runs = _run_all(wanted, request, reporter, say)
    by_dataset = {
        protocol.dataset: [run for run in runs if run.experiment.dataset == protocol.dataset] for protocol in protocols
    }
    table = make_table(file, by_dataset, _deviations(file, wanted, runs))
    table.save(request.folder)
    return table


def _chosen(file: RecipeFile, request: Request) -> list[SvdaExperiment]:
    known = {protocol.dataset: protocol for protocol in file.recipe.protocol}
    for dataset in request.datasets:
        if dataset not in known:
            raise UnknownName(f"dataset of the recipe {file.name}", dataset, known)
    return [protocol for dataset, protocol in known.items() if not request.datasets or dataset in request.datasets]


def _run_all(wanted: list[SvdaExperiment], request: Request, reporter: Reporter | None, say: Say) -> list[SvdaRun]:
    if request.jobs == 1 or len(wanted) == 1:
        return [run_svda(each, request.place(each), reporter=reporter, say=say) for each in wanted]
    threads = max(1, (os.cpu_count() or 1) // request.jobs)
    # Started afresh, not forked: a forked process may inherit locked thread pools.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(request.jobs, mp_context=context, initializer=partial(_alone, threads)) as pool:
        started = {pool.submit(_run_quietly, each, request.place(each)): each for each in wanted}
        say(f"{len(wanted)} runs, {request.jobs} side by side with {threads} threads each")
        try:
            for done in as_completed(started):
                done.result()
                say(f"{started[done].name}: done, {request.place(started[done])}")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [SvdaRun.load(request.place(each)) for each in wanted]


def _alone(threads: int) -> None:
    torch.set_num_threads(threads)
    threading.Thread(target=_stop_when_orphaned, daemon=True).start()


def _stop_when_orphaned() -> None:
    """Asks this process to stop, as Ctrl-C does, when the one that started it is gone, however it went."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)  # a training saves a checkpoint first


def _run_quietly(experiment: SvdaExperiment, folder: Path) -> None:
    parent = multiprocessing.parent_process()
    try:
        run_svda(experiment, folder, reporter=Silent())
    finally:
        if parent is not None and not parent.is_alive():
            os._exit(1)  # the queue may hold more runs, which nobody waits for


def _deviations(file: RecipeFile, wanted: Sequence[SvdaExperiment], runs: Sequence[SvdaRun]) -> list[str]:
    """Tells what differs from the protocol, once for all seeds of a dataset, and what the data had to say."""
    protocols = {protocol.dataset: protocol for protocol in file.recipe.protocol}
    found: dict[str, None] = {}
    for experiment in wanted:
        found |= dict.fromkeys(_differences(experiment, protocols[experiment.dataset]))
    for run in runs:
        found |= dict.fromkeys(f"{run.experiment.dataset}: {note}" for note in run.record["data"]["notes"])
    seeds = {experiment.seed for experiment in wanted}
    if seeds != set(SEEDS):
        found[f"seeds {', '.join(map(str, sorted(seeds)))} instead of {', '.join(map(str, SEEDS))}"] = None
    return list(found)


def _differences(experiment: SvdaExperiment, protocol: SvdaExperiment) -> list[str]:
    own = experiment.dataset
    if experiment.tiny:
        return [f"{own}: generated images and a tiny model; these numbers show that the recipe runs, and nothing else"]
    said = []
    if experiment.epochs != protocol.epochs:
        said.append(f"{own}: {experiment.epochs} epochs instead of {protocol.epochs}")
    if experiment.test_images is not None:
        said.append(f"{own}: measured on {experiment.test_images} test images")
    if experiment.control_images is not None:
        said.append(f"{own}: controls measured on {experiment.control_images} test images")
    if experiment.draws != protocol.draws:
        said.append(f"{own}: {experiment.draws} random controls instead of {protocol.draws}")
    return said
