"""Work for the sweeps of the tests, which needs neither torch nor attention.

Run as a script it runs a sweep over it, for the test that kills one:

    python tests/support/sweep_work.py STORE WORKERS
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from attnrx.support.errors import InvalidInput
from attnrx_lab.sweeps import Job, SweepStore, grid_jobs, run_jobs

SLOW = 0.4  # seconds


def work(words: tuple[str, ...], threads: int) -> dict[str, Any]:
    """Runs WHAT NUMBER FOLDER; every beginning and every end leaves a line in FOLDER."""
    what, number, folder = words
    note(folder, number, "began")
    if what == "slow":
        time.sleep(SLOW)
    if what == "refuse":
        raise InvalidInput(f"{number} is refused.")
    if what == "break":
        raise RuntimeError(f"{number} is broken")
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    print(f"output of {number}", flush=True)
    note(folder, number, "ended")
    return {"value": float(number), "nested": {"square": float(number) ** 2}, "words": "no number"}


def note(folder: str, number: str, what: str) -> None:
    with (Path(folder) / f"{number}.txt").open("a") as file:
        file.write(f"{what}\n")


def notes(folder: Path, number: object) -> list[str]:
    return (folder / f"{number}.txt").read_text().split()


def sweep(folder: Path, what: str = "slow", count: int = 6) -> tuple[Job, ...]:
    return grid_jobs(f"{{what}} {{seed}} {folder}", {"what": [what], "seed": list(range(count))})


def run(folder: Path, workers: int, retry: bool = False) -> dict[str, int]:
    store = SweepStore(folder)
    return run_jobs(store, [state.job for state in store.states()], work, workers, 1, lambda _: None, retry)


if __name__ == "__main__":
    # A shell without job control starts background commands with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    import sweep_work

    # A new process finds the work by the name of its module, and that of a script is __main__.
    sweep_work.run(Path(sys.argv[1]), int(sys.argv[2]))
