"""A sweep that was stopped anywhere, in any way, and run again == one that never was: no finished job runs twice."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from attnrx.support.errors import InvalidInput, UnknownName
from attnrx_lab.sweeps import Job, Result, SweepStore, grid_jobs, load_jobs
from support import sweep_work
from support.sweep_work import notes, run, sweep

pytestmark = pytest.mark.slow

SCRIPT = Path(sweep_work.__file__)
EVERY = [str(number) for number in range(6)]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with six slow jobs."""
    path = tmp_path / "results"
    assert SweepStore(path).add(sweep(tmp_path)) == 6
    return path


def statuses(store: Path) -> list[str]:
    return [entry.state for entry in SweepStore(store).states()]


def values(store: Path) -> dict[str, float | None]:
    return {
        str(result.labels["seed"]): result.value for result in SweepStore(store).results() if result.metric == "value"
    }


def wait_for(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.02)


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def children(process: int) -> list[int]:
    """Every process that comes from this one."""
    reported = subprocess.run(["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    pairs = [tuple(map(int, line.split())) for line in reported.splitlines()]
    own = [child for child, parent in pairs if parent == process]
    return own + [below for child in own for below in children(child)]


def test_a_sweep_runs_every_job_once(store: Path, tmp_path: Path) -> None:
    assert run(store, 2) == {"waiting": 0, "running": 0, "done": 6, "failed": 0}
    assert values(store) == {name: float(name) for name in EVERY}
    assert all(notes(tmp_path, number) == ["began", "ended"] for number in range(6))
    assert run(store, 2)["done"] == 6
    assert all(notes(tmp_path, number) == ["began", "ended"] for number in range(6)), "nothing is done twice"


def test_a_sweep_killed_in_the_middle_goes_on(store: Path, tmp_path: Path) -> None:
    """SIGKILL to the sweep alone: its workers end by themselves, or they would go on beside those of the next one."""
    killed = subprocess.Popen([sys.executable, str(SCRIPT), str(store), "2"])
    wait_for(lambda: statuses(store).count("done") >= 2 and "running" in statuses(store))
    workers = children(killed.pid)
    killed.kill()
    killed.wait()
    wait_for(lambda: not any(alive(worker) for worker in workers))
    # A job may have ended without being recorded before the kill; after it, no worker ends one.
    ended = {
        number: notes(tmp_path, number).count("ended") for number in range(6) if (tmp_path / f"{number}.txt").exists()
    }
    before = {entry.job.id: entry for entry in SweepStore(store).states()}
    finished = [entry for entry in before.values() if entry.state == "done"]
    assert {entry.state for entry in before.values()} == {"done", "waiting"}, "nothing runs any more"
    assert 2 <= len(finished) < 6

    assert run(store, 2)["done"] == 6
    assert values(store) == {name: float(name) for name in EVERY}
    after = {entry.job.id: entry for entry in SweepStore(store).states()}
    for entry in finished:
        assert after[entry.job.id] == entry, "what was finished is as it was"
        assert notes(tmp_path, entry.job.labels["seed"]) == ["began", "ended"]
    done = {int(str(entry.job.labels["seed"])) for entry in finished}
    for number in range(6):
        runs = ended.get(number, 0) + (number not in done)
        assert notes(tmp_path, number).count("ended") == runs


def test_a_job_that_fails_is_recorded_and_the_others_go_on(tmp_path: Path) -> None:
    path = tmp_path / "results"
    store = SweepStore(path)
    for what in ("refuse", "break", "die", "quick"):
        store.add(grid_jobs(f"{what} {{seed}} {tmp_path}", {"seed": [1]}))
    assert run(path, 1) == {"waiting": 0, "running": 0, "done": 1, "failed": 3}
    errors = [entry.error or "" for entry in store.states()]
    assert errors[0] == "1 is refused."
    assert errors[1] == "RuntimeError: 1 is broken"
    assert "was ended by SIGKILL" in errors[2]
    began = notes(tmp_path, 1).count("began")
    assert run(path, 2)["failed"] == 3 and notes(tmp_path, 1).count("began") == began
    assert run(path, 2, retry=True)["failed"] == 3 and notes(tmp_path, 1).count("began") == began + 3


def test_what_a_job_says_is_in_its_folder(store: Path) -> None:
    run(store, 3)
    for entry in SweepStore(store).states():
        log = store / entry.job.id / "log.txt"
        assert log.read_text() == f"output of {entry.job.labels['seed']}\n"


def test_two_sweeps_share_a_store(store: Path, tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, str(SCRIPT), str(store), "1"])
    run(store, 1)
    assert other.wait(timeout=60) == 0
    assert all(notes(tmp_path, number) == ["began", "ended"] for number in range(6))
    assert statuses(store) == ["done"] * 6


def test_a_job_is_claimed_by_one_sweep_at_a_time(tmp_path: Path) -> None:
    first, second = SweepStore(tmp_path / "results"), SweepStore(tmp_path / "results")
    job = Job(("slow",))
    first.add([job])
    # The same thread may take its own lock again, as another process may not.
    with first.claimed(job) as mine, ThreadPoolExecutor(1) as other:
        assert mine and other.submit(statuses, tmp_path / "results").result() == ["running"]
        assert not other.submit(lambda: second.claimed(job).__enter__()).result()
    second.finish(job, [Result("value", 2.0)], None)
    assert [result.value for result in first.results()] == [2.0] and statuses(tmp_path / "results") == ["done"]


def test_the_same_words_are_the_same_job(tmp_path: Path) -> None:
    store = SweepStore(tmp_path / "results")
    assert store.add(sweep(tmp_path, count=2)) == 2
    assert store.add(sweep(tmp_path, count=3)) == 1


def test_words_are_filled_in() -> None:
    first, second = grid_jobs(
        "compare {model} --data x --methods {method} 'a={{share}}' --seed={seed} --out {out}/c.json",
        {"model": {"tiny": "svda:digits --weights w"}, "method": {"mix": "mix=top:{share}"}, "seed": [3, 4]},
    )
    assert " ".join(first.words) == (
        "compare svda:digits --weights w --data x --methods mix=top:{share} a={share} --seed=3 --out {out}/c.json"
    )
    assert first.labels == {"model": "tiny", "method": "mix", "seed": 3}
    assert second.labels["seed"] == 4
    assert first.id != second.id


def test_what_is_no_sweep_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match=r"sead.*did you mean 'seed'"):
        grid_jobs("train {sead}", {"seed": [1]})
    with pytest.raises(InvalidInput, match="nowhere in the command"):
        grid_jobs("train x", {"seed": [1]})
    with pytest.raises(InvalidInput, match="combinations"):
        grid_jobs("train {seed}", {"seed": []})
    with pytest.raises(InvalidInput, match="the axis n has the name of a column"):
        grid_jobs("train --images {n}", {"n": [1, 2]})
    for command in ("{word}", "attnrx {word}"):
        with pytest.raises(InvalidInput, match="has no word"):
            grid_jobs(command, {"word": [" "]})
    file = tmp_path / "sweep.toml"
    file.write_text('comand = "train"')
    with pytest.raises(InvalidInput, match="command is missing"):
        load_jobs(file)
    file.write_text('command = "train {seed}"\n[grid]\nseed = [0, 1]\n')
    assert [job.words for job in load_jobs(file)] == [("train", "0"), ("train", "1")]


def test_a_signal_ends_the_sweep_and_its_jobs_wait_again(store: Path) -> None:
    stopped = subprocess.Popen([sys.executable, str(SCRIPT), str(store), "1"], stderr=subprocess.DEVNULL)
    wait_for(lambda: "running" in statuses(store))
    stopped.send_signal(signal.SIGINT)
    stopped.wait(timeout=30)
    assert "running" not in statuses(store)
