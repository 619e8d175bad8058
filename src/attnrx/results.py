"""The results store: one SQLite file with every job of a sweep, how it went, and the numbers that it gave.

Processes of one machine may share a store: a job is claimed in one transaction, so no two get the same one. Machines
may not: SQLite cannot lock files over networks reliably. Where jobs run elsewhere, one process claims and records.
"""

import hashlib
import json
import os
import platform
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnrx.atomic_writes import process_runs
from attnrx.errors import CheckpointError, InvalidInput

KIND, SCHEMA = "attnrx results", 1
LEASE = 60.0  # seconds after which a job whose owner gave no sign is anybody's
STATES = ("waiting", "running", "done", "failed")
Label = str | int | float | bool | None

TABLES = """
CREATE TABLE IF NOT EXISTS about (kind TEXT NOT NULL, schema INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS jobs (
    place INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    words TEXT NOT NULL,
    labels TEXT NOT NULL,
    status TEXT NOT NULL DEFAULT 'waiting' CHECK (status IN ('waiting', 'running', 'done', 'failed')),
    attempts INTEGER NOT NULL DEFAULT 0,
    owner TEXT, lease REAL, started TEXT, seconds REAL, host TEXT, versions TEXT, error TEXT, record TEXT
);
CREATE TABLE IF NOT EXISTS results (
    job TEXT NOT NULL REFERENCES jobs (id),
    metric TEXT NOT NULL,
    value REAL, low REAL, high REAL, n INTEGER, unit TEXT NOT NULL,
    labels TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS results_of_job ON results (job);
"""


@dataclass(frozen=True)
class Job:
    """One thing to do: the words of a command, and what they stand for in the sweep, such as its seed and dataset.

    Two jobs of the same words are the same job, whatever they are called.
    """

    words: tuple[str, ...]
    labels: Mapping[str, Label] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """A hash of the words."""
        return hashlib.sha256(json.dumps(self.words).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Result:
    """One number that a job gave, with its 95 % interval and count where they are known."""

    metric: str
    value: float | None
    low: float | None = None
    high: float | None = None
    n: int | None = None
    unit: str = ""
    labels: Mapping[str, Label] = field(default_factory=dict)


@dataclass(frozen=True)
class Entry:
    """A job as the store knows it."""

    job: Job
    status: str
    attempts: int
    started: str | None = None
    seconds: float | None = None
    host: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    error: str | None = None
    record: Any = None


@dataclass(frozen=True)
class Ended:
    """How a job went: its record, or its error; both where it failed after all."""

    seconds: float
    record: Any = None
    error: str | None = None
    host: str = field(default_factory=platform.node)
    versions: Mapping[str, str] = field(default_factory=dict)


class Store:
    """The file. Every call is one transaction, so a kill at any moment leaves it whole."""

    def __init__(self, path: Path | str, *, create: bool = True):
        self.path = Path(path)
        if not create and not self.path.is_file():
            raise CheckpointError(f"{path} does not exist; `attnrx sweep run` makes a store.")
        self.owner = f"{platform.node()}/{os.getpid()}/{os.urandom(4).hex()}"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._connection() as connection:
                if create:
                    connection.executescript(TABLES)
                    if connection.execute("SELECT count(*) FROM about").fetchone()[0] == 0:
                        connection.execute("INSERT INTO about VALUES (?, ?)", (KIND, SCHEMA))
                found = connection.execute("SELECT kind, schema FROM about").fetchone()
        except (sqlite3.DatabaseError, OSError) as error:
            raise CheckpointError(f"{path} cannot be used as a results store ({error}).") from error
        if found is None or tuple(found) != (KIND, SCHEMA):
            raise CheckpointError(f"{path} is no results store of schema {SCHEMA} (it says {found and tuple(found)}).")

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        connection = sqlite3.connect(self.path, timeout=30, isolation_level=None)
        try:
            connection.row_factory = sqlite3.Row
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA foreign_keys=ON")
            yield connection
        finally:
            connection.close()

    @contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        """One transaction, alone from its beginning: what it reads stays true until it has written."""
        with self._connection() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
            except BaseException:
                connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")

    def add(self, jobs: Iterable[Job]) -> int:
        """Adds the jobs that are not there yet, and says how many those were."""
        with self._changing() as connection:
            before = connection.total_changes
            for job in jobs:
                connection.execute(
                    "INSERT OR IGNORE INTO jobs (id, words, labels) VALUES (?, ?, ?)",
                    (job.id, json.dumps(job.words), json.dumps(dict(job.labels))),
                )
            return connection.total_changes - before

    def claim(self) -> Job | None:
        """Takes the next waiting job, or one whose owner is gone; None where there is none."""
        with self._changing() as connection:
            rows = connection.execute(
                "SELECT * FROM jobs WHERE status = 'waiting' OR status = 'running' ORDER BY place"
            ).fetchall()
            free = next((row for row in rows if row["status"] == "waiting" or self._left(row)), None)
            if free is None:
                return None
            connection.execute(
                "UPDATE jobs SET status = 'running', owner = ?, lease = ?, attempts = attempts + 1, started = ?, "
                "error = NULL WHERE id = ?",
                (self.owner, time.time() + LEASE, time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), free["id"]),
            )
            return _job(free)

    def _left(self, row: sqlite3.Row) -> bool:
        """Whether the owner of a running job is gone: its lease ran out, or it was a process here that is no more."""
        host, process, _ = row["owner"].rsplit("/", 2)
        if row["lease"] < time.time():
            return True
        return row["owner"] != self.owner and host == platform.node() and not process_runs(int(process))

    def renew(self) -> None:
        """Says that this owner is still at its jobs; to be said several times in every LEASE."""
        with self._changing() as connection:
            connection.execute(
                "UPDATE jobs SET lease = ? WHERE status = 'running' AND owner = ?", (time.time() + LEASE, self.owner)
            )

    def finish(self, job: Job, ended: Ended, results: Iterable[Result] = ()) -> bool:
        """Records how a claimed job went, and its numbers; False where another has taken it over meanwhile."""
        with self._changing() as connection:
            changed = connection.execute(
                "UPDATE jobs SET status = ?, owner = NULL, lease = NULL, seconds = ?, host = ?, versions = ?, "
                "error = ?, record = ? WHERE id = ? AND owner = ? AND status = 'running'",
                (
                    "done" if ended.error is None else "failed",
                    ended.seconds,
                    ended.host,
                    json.dumps(dict(ended.versions)),
                    ended.error,
                    json.dumps(ended.record),
                    job.id,
                    self.owner,
                ),
            ).rowcount
            if not changed:
                return False
            connection.execute("DELETE FROM results WHERE job = ?", (job.id,))
            connection.executemany(
                "INSERT INTO results VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                [
                    (job.id, each.metric, each.value, each.low, each.high, each.n, each.unit, json.dumps(each.labels))
                    for each in results
                ],
            )
        return True

    def release(self) -> None:
        """Gives back the jobs that this owner has not finished."""
        with self._changing() as connection:
            connection.execute(
                "UPDATE jobs SET status = 'waiting', owner = NULL, lease = NULL WHERE status = 'running' AND owner = ?",
                (self.owner,),
            )

    def retry(self) -> int:
        """Lets failed jobs wait again, and says how many they are."""
        with self._changing() as connection:
            return connection.execute("UPDATE jobs SET status = 'waiting' WHERE status = 'failed'").rowcount

    def entries(self) -> tuple[Entry, ...]:
        """Gives every job, in the order in which they were added."""
        with self._connection() as connection:
            rows = connection.execute("SELECT * FROM jobs ORDER BY place").fetchall()
        return tuple(
            Entry(
                _job(row),
                row["status"],
                row["attempts"],
                row["started"],
                row["seconds"],
                row["host"],
                json.loads(row["versions"] or "{}"),
                row["error"],
                json.loads(row["record"] or "null"),
            )
            for row in rows
        )

    def counts(self) -> dict[str, int]:
        """Gives how many jobs there are in every state."""
        with self._connection() as connection:
            found = dict(connection.execute("SELECT status, count(*) FROM jobs GROUP BY status").fetchall())
        return {state: found.get(state, 0) for state in STATES}

    def results(self) -> tuple[Result, ...]:
        """Gives every number of the jobs that are done; its labels are those of its job and its own."""
        with self._connection() as connection:
            rows = connection.execute(
                "SELECT results.*, jobs.labels AS job_labels FROM results JOIN jobs ON jobs.id = results.job "
                "WHERE jobs.status = 'done' ORDER BY jobs.place, results.rowid"
            ).fetchall()
        return tuple(
            Result(
                row["metric"],
                row["value"],
                row["low"],
                row["high"],
                row["n"],
                row["unit"],
                {**json.loads(row["job_labels"]), **json.loads(row["labels"])},
            )
            for row in rows
        )


def require_labels(labels: Mapping[str, Any]) -> dict[str, Label]:
    """Gives labels that a store can hold, or refuses them by name."""
    for name, value in labels.items():
        if value is not None and not isinstance(value, str | int | float | bool):
            raise InvalidInput(f"{name}={value!r}: a label is a text, a number, true or false.")
    return dict(labels)


def _job(row: sqlite3.Row) -> Job:
    return Job(tuple(json.loads(row["words"])), json.loads(row["labels"]))
