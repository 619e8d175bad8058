"""A sweep that was stopped anywhere, in any way, and run again == one that never was: no finished job runs twice."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import sweep_work
from attnrx.errors import InvalidInput, UnknownName
from attnrx.results import Ended, Job, Result, Store
from attnrx.sweeps import Sweep, make_engine, run_jobs
from sweep_work import notes, run, sweep

SCRIPT = Path(sweep_work.__file__)
EVERY = [str(number) for number in range(6)]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with six slow jobs."""
    path = tmp_path / "results.sqlite"
    assert Store(path).add(sweep(tmp_path).jobs) == 6
    return path


def statuses(store: Path) -> list[str]:
    return [entry.status for entry in Store(store).entries()]


def values(store: Path) -> dict[str, float | None]:
    return {str(result.labels["seed"]): result.value for result in Store(store).results() if result.metric == "value"}


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
    told = subprocess.run(["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    pairs = [tuple(map(int, line.split())) for line in told.splitlines()]
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
    before = {entry.job.id: entry for entry in Store(store).entries()}
    finished = [entry for entry in before.values() if entry.status == "done"]
    begun = [entry for entry in before.values() if entry.status == "running"]
    assert begun, "the kill came while jobs were running"
    assert 2 <= len(finished) < 6

    assert run(store, 2)["done"] == 6
    assert values(store) == {name: float(name) for name in EVERY}
    after = {entry.job.id: entry for entry in Store(store).entries()}
    for entry in finished:
        assert after[entry.job.id] == entry, "what was finished is as it was"
        assert notes(tmp_path, entry.job.labels["seed"]) == ["began", "ended"]
    assert {after[entry.job.id].attempts for entry in begun} == {2}
    assert all(notes(tmp_path, number).count("ended") == 1 for number in range(6))


def test_a_job_that_fails_is_recorded_and_the_others_go_on(tmp_path: Path) -> None:
    path = tmp_path / "results.sqlite"
    store = Store(path)
    for what in ("refuse", "break", "die", "quick"):
        store.add(Sweep.of([what, "{seed}", str(tmp_path)], {"seed": [1]}).jobs)
    assert run(path, 1) == {"waiting": 0, "running": 0, "done": 1, "failed": 3}
    errors = [entry.error or "" for entry in store.entries()]
    assert errors[0] == "1 is refused."
    assert errors[1] == "RuntimeError: 1 is broken"
    assert "was ended by SIGKILL" in errors[2]
    assert store.retry() == 3
    assert run(path, 2)["failed"] == 3
    assert [entry.attempts for entry in store.entries()] == [2, 2, 2, 1]


def test_what_a_job_says_is_in_its_folder(store: Path) -> None:
    run(store, 3)
    for entry in Store(store).entries():
        log = store.with_suffix(".jobs") / entry.job.id / "log.txt"
        assert log.read_text() == f"said by {entry.job.labels['seed']}\n"


def test_two_sweeps_share_a_store(store: Path, tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, str(SCRIPT), str(store), "1"])
    run(store, 1)
    assert other.wait(timeout=60) == 0
    assert all(notes(tmp_path, number) == ["began", "ended"] for number in range(6))
    assert statuses(store) == ["done"] * 6


def test_every_job_is_claimed_by_one(tmp_path: Path) -> None:
    path = tmp_path / "results.sqlite"
    first, second = Store(path), Store(path)
    first.add(Job((str(number),)) for number in range(5))
    claimed = [each.claim() for each in (first, second, first, second, first, second)]
    assert sorted(job.words[0] for job in claimed if job) == ["0", "1", "2", "3", "4"]
    assert claimed[-1] is None


def test_a_job_is_anybodys_when_its_lease_ran_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a machine that is gone leaves it: whoever was late has no say any more."""
    path = tmp_path / "results.sqlite"
    late, other = Store(path), Store(path)
    late.add([Job(("slow",))])
    job = late.claim()
    assert job is not None
    now = time.time()
    monkeypatch.setattr("attnrx.results.time.time", lambda: now + 50)
    late.renew()
    monkeypatch.setattr("attnrx.results.time.time", lambda: now + 100)
    assert other.claim() is None, "the lease was renewed"
    monkeypatch.setattr("attnrx.results.time.time", lambda: now + 120)
    assert other.claim() == job
    assert not late.finish(job, Ended(1.0, {}), [Result("value", 1.0)])
    assert other.finish(job, Ended(2.0, {}), [Result("value", 2.0)])
    assert [result.value for result in other.results()] == [2.0]


def test_the_same_words_are_the_same_job(tmp_path: Path) -> None:
    store = Store(tmp_path / "results.sqlite")
    assert store.add(sweep(tmp_path, count=2).jobs) == 2
    assert store.add(sweep(tmp_path, count=3).jobs) == 1


def test_words_are_filled_in() -> None:
    made = Sweep.of(
        "compare {model} --data x --contenders {contender} 'a={{share}}' --seed={seed} --out {out}/c.json",
        {"model": {"tiny": ["svda:digits", "--weights", "w"]}, "contender": {"mix": "mix=top:{share}"}, "seed": [3, 4]},
    )
    first, second = made.jobs
    assert " ".join(first.words) == (
        "compare svda:digits --weights w --data x --contenders mix=top:{share} a={share} --seed=3 --out {out}/c.json"
    )
    assert first.labels == {"model": "tiny", "contender": "mix", "seed": 3}
    assert second.labels["seed"] == 4
    assert first.id != second.id


def test_what_is_no_sweep_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match=r"sead.*did you mean 'seed'"):
        Sweep.of("train {sead}", {"seed": [1]})
    with pytest.raises(InvalidInput, match="nowhere in the command"):
        Sweep.of("train x", {"seed": [1]})
    with pytest.raises(InvalidInput, match="at least one value"):
        Sweep.of("train {seed}", {"seed": []})
    file = tmp_path / "sweep.toml"
    file.write_text('comand = "train"')
    with pytest.raises(InvalidInput, match="command is missing"):
        Sweep.load(file)
    file.write_text('command = "train {seed}"\n[grid]\nseed = [0, 1]\n')
    assert [job.words for job in Sweep.load(file).jobs] == [("train", "0"), ("train", "1")]


@pytest.mark.slow
def test_ray_runs_the_same_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    # Its workers are no children of this process, and must find the work as they find attnrx.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    path = tmp_path / "results.sqlite"
    store = Store(path)
    store.add(sweep(tmp_path, "quick", 3).jobs)
    store.add(Sweep.of(["break", "{seed}", str(tmp_path)], {"seed": [9]}).jobs)
    counts = run_jobs(store, make_engine("ray", sweep_work.work, 2, threads=1), 1, lambda _: None)
    assert counts == {"waiting": 0, "running": 0, "done": 3, "failed": 1}, store.entries()
    assert values(path) == {name: float(name) for name in EVERY[:3]}
    assert store.entries()[-1].error == "RuntimeError: 9 is broken"


def test_a_signal_ends_the_sweep_and_its_jobs_wait_again(store: Path) -> None:
    stopped = subprocess.Popen([sys.executable, str(SCRIPT), str(store), "1"], stderr=subprocess.DEVNULL)
    wait_for(lambda: "running" in statuses(store))
    stopped.send_signal(signal.SIGINT)
    stopped.wait(timeout=30)
    assert "running" not in statuses(store)
