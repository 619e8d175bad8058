"""The engines by name."""

import os
from collections.abc import Sequence

from attnrx.errors import InvalidInput, UnknownName
from attnrx.sweeps.engine import Engine, Work
from attnrx.sweeps.processes import Processes
from attnrx.sweeps.ray_cluster import RayCluster

ENGINES = ("processes", "ray")


def make_engine(
    name: str, work: Work, workers: int, threads: int, gpus: float = 0.0, preload: Sequence[str] = ()
) -> Engine:
    """Gives an engine; `gpus` are reserved for each job where the engine can, and shared by all where it cannot."""
    if threads < 1 or gpus < 0:
        raise InvalidInput(f"threads={threads}, gpus={gpus}: give at least one thread, and no negative number of GPUs.")
    if name == "ray":
        return RayCluster(work, workers, threads, gpus)
    if name != "processes":
        raise UnknownName("engine", name, ENGINES)
    if gpus:
        raise InvalidInput(f"gpus={gpus} are reserved by the engine ray alone; with processes, all jobs see all GPUs.")
    return Processes(work, workers, preload)


def threads_each(workers: int) -> int:
    """Gives the CPU threads of each worker, so that all together are as many as there are processors."""
    return max(1, (os.cpu_count() or 1) // workers)
