"""The store of a sweep: a folder with one folder per job, which holds its record, its output and the files it writes.

A job is run under the lock of its folder, which the system releases when the process ends, however it ends. So several
sweeps share a store, also on several machines that share a disk, and a job without a result waits to be run again.
"""

import hashlib
import itertools
import json
import math
import os
import shlex
import sys
import time
import tomllib
import traceback
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev
from string import Formatter
from threading import Event
from typing import Any

from attnrx.show.checks.statistics import t_interval
from attnrx.show.reports.numbers import MISSING, interval, quantity
from attnrx.support.atomic_writes import file_lock
from attnrx.support.errors import AttnrxError, CheckpointError, InvalidInput, NotSupported, UnknownName
from attnrx.support.progress import Log
from attnrx.support.storage import read_record, write_json
from attnrx.support.subprocess_runner import FORKS, ProcessEnded, Subprocess
from attnrx.support.validation import (
    JSON_OBJECT,
    Choice,
    Field,
    Integer,
    Items,
    Number,
    Optional,
    Record,
    Text,
    require_regular,
    validated,
)

Label = str | int | float | bool | None
Words = tuple[str, ...]

OUT = "out"  # {out} is the folder of the job, which is known when it runs
FORM = 'command = "compare {model} --seed {seed} ...", and under [grid] e.g. seed = [0, 1, 2]'
COLUMNS = ("metric", "value", "low", "high", "n", "unit")  # of every number in a CSV of the results, beside its axes
MOST_JOBS = 100_000  # more are a mistake in an axis, and would fill the disk
RECORD = Record({"command": Text()}, {"grid": JSON_OBJECT})


@dataclass(frozen=True)
class Job:
    """The words of one command, and the axis values that they were made from.

    Two jobs of the same words are the same job, whatever their labels are.
    """

    words: Words
    labels: Mapping[str, Label] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """A hash of the words; 64 bits name a folder."""
        return hashlib.sha256(json.dumps(self.words).encode()).hexdigest()[:16]

    @property
    def title(self) -> str:
        """The labels in one line, or the words where there are none."""
        return " ".join(f"{name}={value}" for name, value in self.labels.items()) or " ".join(self.words)


def load_jobs(path: Path | str) -> tuple[Job, ...]:
    """Reads the jobs of a sweep from TOML: `command`, a text, and `grid`, the values of its axes.

    Raises:
        InvalidInput: The file is unreadable or has another form.
    """
    try:
        record = tomllib.loads(require_regular(path).read_text(encoding="utf-8"))
        validated(record, RECORD, path)
    except (OSError, ValueError, RecursionError, CheckpointError) as error:
        raise InvalidInput(f"{path} cannot be read as a sweep ({error}); it has {FORM}.") from error
    return grid_jobs(record["command"], record.get("grid", {}))


def grid_jobs(command: str, grid: Mapping[str, Any]) -> tuple[Job, ...]:
    """Fills a command of attnrx with every combination of values, the last axis changing fastest.

    {AXIS} is replaced by a value of that axis, {out} by a folder of the job; then the command is cut into words, so
    '{AXIS}' in quotes stays one word. Literal braces are doubled: {{share}} in a command is the {share} of a rule. An
    axis is a list of texts and numbers, or a table of names and such values.

    Raises:
        InvalidInput: The command or the values of an axis are invalid, or there are too many combinations.
        UnknownName: The command has an axis without values.
    """
    axes = {name: _values(name, axis) for name, axis in grid.items()}
    count = math.prod(map(len, axes.values()))
    if not command.strip() or not 0 < count <= MOST_JOBS:
        raise InvalidInput(
            f"a sweep has a command and 1 to {MOST_JOBS:,} combinations of values, not {count:,}: {FORM}."
        )
    jobs = []
    try:
        used = {name for _, name, _, _ in Formatter().parse(command) if name is not None}
        for name in used - axes.keys() - {OUT}:
            doubled = f"{{{{{name}}}}}"
            raise UnknownName(f"axis in the command (braces of its own are doubled, {doubled})", name, [*axes, OUT])
        for name in sorted(axes.keys() & set(COLUMNS)):
            raise InvalidInput(f"the axis {name} has the name of a column of the results; give it another one.")
        for name in axes.keys() - used:
            raise InvalidInput(f"the axis {name} is nowhere in the command; write {{{name}}} where its values go.")
        for point in itertools.product(*(values.items() for values in axes.values())):
            values = {name: value for name, (_, value) in zip(axes, point, strict=True)}
            # {out} stays in the words, so that a job has the same id in every folder.
            words = shlex.split(command.format_map({OUT: f"{{{OUT}}}", **values}))
            labels = {name: label for name, (label, _) in zip(axes, point, strict=True)}
            # The name of the program may be written, as in a shell.
            job = Job(tuple(words[1:] if words[:1] == ["attnrx"] else words), labels)
            if not job.words:
                raise InvalidInput(f"the command {command!r} has no word for {labels}; write a command of attnrx.")
            jobs.append(job)
    except ValueError as error:  # a quote or a brace that is not closed
        raise InvalidInput(f"the command {command!r} cannot be cut into words: {str(error).lower()}.") from error
    return tuple(jobs)


def _values(name: str, axis: Any) -> dict[Label, str]:
    table = {value: value for value in axis} if _plain(axis) else axis
    if not isinstance(table, Mapping) or not _plain(list(table.values())):
        raise InvalidInput(
            f"the axis {name} is {axis!r}; give a list of texts and numbers, or a table of names and such values."
        )
    # The booleans of TOML, as they are written in rules and policies.
    return {label: str(value).lower() if isinstance(value, bool) else str(value) for label, value in table.items()}


def _plain(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str | int | float) for value in values)


SEED = "seed"


@dataclass(frozen=True)
class Result:
    """One number of a job, with its 95 % interval and count where they are known."""

    metric: str
    value: float | None
    low: float | None = None
    high: float | None = None
    n: int | None = None
    unit: str = ""
    labels: Mapping[str, Label] = field(default_factory=dict)


@dataclass(frozen=True)
class Mean:
    """One number over `runs` seeds: mean, standard deviation and 95 % t interval.

    For a single seed, and if all seeds agree, the interval is that of the measurement.
    """

    metric: str
    unit: str
    labels: Mapping[str, Label]
    value: float | None
    low: float | None
    high: float | None
    runs: int
    deviation: float | None = None

    def __str__(self) -> str:
        return f"{quantity(self.value, self.unit, self.low, self.high)} {interval(self.low, self.high)}".strip()


def means_table(means: Sequence[Mean]) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Returns the names of all columns, and one line of texts for every combination of labels."""
    axes = tuple(dict.fromkeys(name for mean in means for name in mean.labels))
    metrics = tuple(dict.fromkeys(mean.metric for mean in means))
    lines: dict[tuple[Label, ...], dict[str, Mean]] = defaultdict(dict)
    for mean in means:
        lines[tuple(mean.labels.get(name) for name in axes)][mean.metric] = mean
    rows = (
        (
            *(MISSING if label is None else str(label) for label in labels),
            str(max(mean.runs for mean in means_of_metrics.values())),
            *(str(means_of_metrics.get(metric, MISSING)) for metric in metrics),
        )
        for labels, means_of_metrics in lines.items()
    )
    return (*axes, "seeds", *metrics), tuple(rows)


def over_seeds(results: Sequence[Result]) -> tuple[Mean, ...]:
    """Groups numbers that differ in their seed alone."""
    groups: dict[tuple[str, tuple[tuple[str, Label], ...]], list[Result]] = defaultdict(list)
    for result in results:
        labels = tuple(sorted((name, value) for name, value in result.labels.items() if name != SEED))
        groups[result.metric, labels].append(result)
    return tuple(_mean(group) for group in groups.values())


def _mean(results: Sequence[Result]) -> Mean:
    first = results[0]
    labels = {name: value for name, value in first.labels.items() if name != SEED}
    measured = [result for result in results if result.value is not None]
    values = _by_seed(measured, "value")
    if len(set(values)) > 1:  # equal values have no spread: a t interval of zero width would hide the measurement's
        over = t_interval(values)
        return Mean(first.metric, first.unit, labels, fmean(values), over.low, over.high, len(values), stdev(values))
    value, low, high = (next(iter(_by_seed(measured, name)), None) for name in ("value", "low", "high"))
    return Mean(first.metric, first.unit, labels, value, low, high, len(values))


def _by_seed(results: Sequence[Result], name: str) -> list[float]:
    """Returns one value per seed: several jobs of one seed may measure the same model, such as the original."""
    values_of_seed: dict[Label, list[float]] = defaultdict(list)
    for result in results:
        if (value := getattr(result, name)) is not None:
            values_of_seed[result.labels.get(SEED)].append(value)
    return [fmean(values) for values in values_of_seed.values()]


# By kind of record: the list of its entries, the labels of an entry, and the metrics of an entry with their units. An
# entry without metrics is a number itself, and is named by its claim or its column.
RECORDS: Mapping[str, tuple[str, tuple[str, ...], Mapping[str, str]]] = {
    "attnrx comparison": (
        "trials",
        ("method", "share", "target"),
        {"accuracy": "%", "change": "points", "agreement": "%", "divergence": "nats", "macs_share": "", "seconds": "s"},
    ),
    "attnrx speeds": ("speeds", ("method", "share", "batch", "threads"), {"speedup": "x", "macs_share": ""}),
    "attnrx evidence": ("findings", ("check",), {}),
    "attnrx reproduced table": ("cells", ("row",), {}),
}


def rows_of(record: Mapping[str, Any]) -> tuple[Result, ...]:
    """Returns the numbers of a command's record."""
    if record.get("kind") not in RECORDS:
        return tuple(_flat(record))
    entries, names, metrics = RECORDS[record["kind"]]
    rows = []
    for entry in record[entries]:
        # Batch, threads and rounds of a speed are those of its latency.
        facts = {**entry.get("latency", {}), **entry}
        labels = {name: facts[name] for name in names if facts.get(name) is not None}
        n = facts.get("n", facts.get("rounds"))
        if not metrics:
            rows.append(_result(facts.get("claim") or facts["column"], facts, n, facts.get("unit", ""), labels))
        rows += [_result(metric, facts[metric], n, unit, labels) for metric, unit in metrics.items()]
    return tuple(rows)


def of_job(result: Result, labels: Mapping[str, Label]) -> Result:
    """Returns a number with the labels of its job, too.

    An axis may have the name of a label of the record, such as method or check. Both are kept, or jobs that differ in
    that axis alone would be averaged like seeds.
    """
    own = {
        f"{name} in the record" if name in labels else name: value
        for name, value in result.labels.items()
        if name not in labels or labels[name] != value
    }
    return replace(result, labels={**labels, **own})


def _result(metric: str, number: Any, n: int | None, unit: str, labels: Mapping[str, Label]) -> Result:
    """Returns a number, an estimate, or a list of the value and the ends of its interval."""
    if isinstance(number, Mapping):
        number = [number[name] for name in ("value", "low", "high")]
    value, low, high = number if isinstance(number, list | tuple) else (number, None, None)
    return Result(metric, value, low, high, n, unit, labels)


def _flat(record: Mapping[str, Any], prefix: str = "") -> Iterator[Result]:
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, bool | int | float):
            yield Result(f"{prefix}{name}", float(value))


KIND, SCHEMA = "attnrx sweep job", 1
STATES = ("waiting", "running", "done", "failed")
Work = Callable[[Words, int], dict[str, Any]]  # words and CPU threads -> a JSON-ready record; importable
Outcome = tuple[tuple[Result, ...], str | None]  # the numbers of a job, or its error

LABEL = Field("a text, a number, true, false or null", lambda value: isinstance(value, str | int | float | None))
NAMED = Field("an object", lambda value: isinstance(value, dict) and all(map(LABEL.allows, value.values())))
RESULT = Record(
    {"metric": Text(), "value": Optional(Number())},
    {"low": Optional(Number()), "high": Optional(Number()), "n": Optional(Integer()), "unit": Text(), "labels": NAMED},
)
FIELDS = Record(
    {
        "kind": Choice((KIND,)),
        "schema": Integer(),
        "number": Integer(),
        "words": Items(Text(), 1, 10_000),
        "labels": NAMED,
    },
    {"seconds": Optional(Number(0.0)), "results": Items(RESULT, 0, 10**6), "error": Optional(Text())},
)


@dataclass(frozen=True)
class JobState:
    """A job and its last attempt: its state, one of STATES, and its results or its error once it has ended.

    `number` is its place in the order in which the jobs were added.
    """

    job: Job
    number: int
    state: str = "waiting"
    seconds: float | None = None
    error: str | None = None
    results: tuple[Result, ...] = ()


class SweepStore:
    """The jobs of sweeps in a folder.

    Raises:
        CheckpointError: It is no folder, or has no jobs where `create` is false; by every method, if a record in it was
            edited or is damaged.
    """

    def __init__(self, folder: Path | str, create: bool = True):
        self.folder = Path(folder)
        if self.folder.exists() and not self.folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder; name the folder of a sweep, or a new one.")
        if not create and not self._folders():
            raise CheckpointError(
                f"{folder} has no jobs of a sweep; `attnrx sweep run FILE --store {folder}` adds them."
            )

    def folder_of(self, job: Job) -> Path:
        return self.folder / job.id

    def add(self, jobs: Iterable[Job]) -> int:
        """Adds the jobs that are not in the store yet and returns how many they are."""
        known = {state.job.id for state in self.states()}
        new = {job.id: job for job in jobs if job.id not in known}
        for number, job in enumerate(new.values(), len(known)):
            self._write(JobState(job, number))
        return len(new)

    def state(self, job: Job) -> JobState:
        """Returns the state of a job of the store, as its record has it: running jobs still wait there."""
        return self._read(self.folder_of(job))

    def states(self) -> tuple[JobState, ...]:
        """Returns every job with its last attempt, in the order in which they were added."""
        return tuple(sorted(map(self._shown, self._folders()), key=lambda state: (state.number, state.job.id)))

    def counts(self) -> dict[str, int]:
        states = [state.state for state in self.states()]
        return {state: states.count(state) for state in STATES}

    def results(self) -> tuple[Result, ...]:
        """Returns the numbers of all finished jobs; the labels of each are those of its job and its own."""
        return tuple(of_job(result, state.job.labels) for state in self.states() for result in state.results)

    def finish(self, job: Job, results: Iterable[Result], error: str | None, seconds: float = 0.0) -> None:
        """Stores the results of a job, or its error."""
        state = "done" if error is None else "failed"
        self._write(JobState(job, self.state(job).number, state, seconds, error, tuple(results)))

    @contextmanager
    def claimed(self, job: Job, seconds: float = 0.0) -> Iterator[bool]:
        """Holds the lock of a job; yields False if another process or thread holds it for so many seconds."""
        with ExitStack() as stack:
            try:
                stack.enter_context(file_lock(self.folder_of(job), seconds))
            except CheckpointError:
                yield False
                return
            yield True

    def _folders(self) -> list[Path]:
        return [path.parent for path in self.folder.glob("*/job.json")]

    def _shown(self, folder: Path) -> JobState:
        state = self._read(folder)
        if state.state != "waiting":
            return state
        with self.claimed(state.job) as is_free:
            return state if is_free else JobState(state.job, state.number, "running")

    def _read(self, folder: Path) -> JobState:
        path = folder / "job.json"
        record = read_record(path, KIND, SCHEMA, FIELDS)
        job = Job(tuple(record["words"]), record["labels"])
        if job.id != folder.name:
            raise CheckpointError(f"{path}: words are not those of the job {folder.name}; the file was edited.")
        seconds, error = record.get("seconds"), record.get("error")
        state = "failed" if error is not None else "waiting" if seconds is None else "done"
        results = tuple(Result(**each) for each in record.get("results", ()))
        return JobState(job, record["number"], state, seconds, error, results)

    def _write(self, state: JobState) -> None:
        job, results = state.job, [asdict(result) for result in state.results]
        record = {"kind": KIND, "schema": SCHEMA, "number": state.number, "words": list(job.words)}
        record |= {"labels": dict(job.labels), "seconds": state.seconds, "results": results, "error": state.error}
        write_json(self.folder_of(job) / "job.json", record)


def run_jobs(
    store: SweepStore, jobs: Collection[Job], work: Work, workers: int, threads: int, log: Log, retry: bool = False
) -> dict[str, int]:
    """Runs those of the jobs that have no result, `workers` side by side; returns the states of all jobs of the store.

    Every job has a process of its own with `threads` CPU threads, so a crash ends one job only; it is stored with its
    error and the others continue. After an interruption the running jobs wait again; if the sweep is killed, their
    processes end by themselves. Other jobs of the store are not run: they may be commands of anybody.

    Args:
        store: The store, to which the jobs were added.
        jobs: The jobs.
        work: What a job does; a function that a module defines.
        workers: Jobs side by side.
        threads: CPU threads of each.
        log: Is called when a job has ended.
        retry: Whether jobs that failed are run again.
    """
    stopped, idle, processes, ended = Event(), list[Subprocess](), list[Subprocess](), list[Job]()

    def run(job: Job) -> None:
        # Whoever reads the states holds each lock for a moment.
        with store.claimed(job, 1.0) as is_mine:
            if not is_mine or stopped.is_set():
                return
            if store.state(job).state in ("done", "" if retry else "failed"):
                ended.append(job)
                return
            if idle:
                process = idle.pop()
            else:
                processes.append(process := Subprocess(keeps_memory=False))
            folder, start = store.folder_of(job).resolve(), time.monotonic()
            words = tuple(word.replace(f"{{{OUT}}}", str(folder)) for word in job.words)
            try:
                results, error = process.call(_run_job, work, words, threads, str(folder / "log.txt"))
                # Without forks the jobs of a process would share its state.
                idle.extend([process] if FORKS else [])
            except ProcessEnded as problem:
                results, error = (), f"the process of the job {problem.how}; its output is in log.txt of its folder."
            except NotSupported as problem:
                results, error = (), str(problem)
            if stopped.is_set():  # which ended the process
                return
            store.finish(job, results, error, time.monotonic() - start)
        ended.append(job)
        outcome = f"done, {len(results)} numbers" if error is None else f"FAILED: {error}"
        log(f"{len(ended)} of {len(jobs)}: {job.title}: {outcome}")

    # The threads wait for the processes.
    with ThreadPoolExecutor(workers) as pool:
        try:
            for task in [pool.submit(run, job) for job in jobs]:
                task.result()
        finally:
            stopped.set()
            for process in processes:
                process.close()
    return store.counts()


def _run_job(work: Work, words: Words, threads: int, log: str) -> Outcome:
    with _output_to(log):
        try:
            return rows_of(work(words, threads)), None
        except Exception as error:
            traceback.print_exc()
            return (), str(error) if isinstance(error, AttnrxError) else f"{type(error).__name__}: {error}"


@contextmanager
def _output_to(path: str) -> Iterator[None]:
    """Appends the output of this process to a file, also that of libraries, which write to the descriptors."""
    kept = [os.dup(number) for number in (1, 2)]
    with open(path, "ab") as file:  # noqa: PTH123 - for its descriptor
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        try:
            yield
        finally:
            for stream, number, copy in zip((sys.stdout, sys.stderr), (1, 2), kept, strict=True):
                stream.flush()
                os.dup2(copy, number)
                os.close(copy)
