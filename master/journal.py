"""What a master must still know after it was killed: jobs, what they made, its workers' slots.

The journal is an SQLite file of the master's user alone. What an event changes is one transaction,
and nothing is done about an event before that has been committed: a worker that is told something,
and a client that is shown a step, can rely on a master that was started again to know of it. The
file is not forced to disk with each transaction, so that a master may be killed at any time and a
machine that loses its power may lose the last steps.

A master's memory is rebuilt from rows, and not by repeating what happened: a job is one record
(see `record_json`), its outputs and other events are rows as readers get them, and so are what its
ranks printed and the plans of a job that is compiled only; what a worker has been told and has not
yet confirmed are rows of its slot.
"""

from __future__ import annotations

import json
import os
import sqlite3
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from plancompiler.cluster.chunks import Parcel, parcel_of
from plancompiler.cluster.messages import (
    JobEvent,
    LogLines,
    MasterMessage,
    RankOutputs,
    StepDone,
)
from plancompiler.cluster.serde import JOB_EVENTS, MASTER_MESSAGES, WORKER_MESSAGES, Reader
from plancompiler.errors import ClusterError, SecurityError, VersionError
from plancompiler.master.record_json import from_json, to_json
from plancompiler.master.records import JobRecord, Worker
from plancompiler.master.step_counts import StepCounts
from plancompiler.proto import cluster_pb2 as pb

_FORMAT = 2
_TABLES = """
create table about (name text primary key, value) without rowid;
create table job (
    id integer primary key, owner text, outputs text, record text, counts text, data blob
);
create table event (number integer primary key, job integer, step integer, message blob);
create index event_of_job on event (job, step);
create table plan (number integer primary key, job integer, rank integer, message blob);
create index plan_of_job on plan (job, rank);
create table line (
    number integer primary key, job integer, rank integer, first integer, next integer, message blob
);
create index line_of_job on line (job, rank);
create table worker (slot integer primary key, record text);
create table command (number integer primary key, slot integer, place integer, message blob);
create index command_of_slot on command (slot, place);
"""
_FREE_DISK = (
    "free its disk and start the master again, which goes on where it was; or start with another "
    "--journal, without the jobs of this one"
)
_START_ANOTHER = (
    "this file is damaged, or no journal: start the master with another --journal; it then knows "
    "none of the jobs of this one"
)
_NAME_ANOTHER = "name a file of this user, in a folder that there is"
GRAPH = -1
"""In place of a rank: the boxing task graph, which is kept with the plans of ranks."""
FORGOTTEN = frozenset({"shipping", "facts", "kernels", "told", "asked"})
"""Fields of a job that a master which starts again does without."""


@dataclass(frozen=True, slots=True)
class KeptJob:
    """A job of an earlier master."""

    record: JobRecord
    owner: str
    outputs: tuple[str, ...]
    """Of each step, by name."""
    data: bytes
    events: tuple[JobEvent, ...]
    plans: dict[int, Parcel]
    """By rank, and of `GRAPH`, where the job is compiled only."""
    lines: tuple[tuple[int, int, LogLines], ...]
    """What ranks printed: rank, the number of the first line among those of its rank, lines."""


@dataclass(slots=True)
class _Counts:
    """What changes of a job with each step."""

    counts: StepCounts
    reported: dict[int, set[int]]
    done_steps: int


_COUNTS = frozenset(each.name for each in fields(_Counts))
"""Fields of a job that are kept apart."""


class Journal:
    """The journal of one master, which nobody else may open meanwhile."""

    def __init__(self, path: Path, version: str, world_size: int) -> None:
        """Open it, or make it. ClusterError where it cannot be used, is damaged or is in use by
        another master; VersionError for one of another version; SecurityError where others could
        read or change it.
        """
        self.path = path
        with self._explained():
            _make_private(path)
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            with self._explained():
                self._open(version, world_size)
        except BaseException:
            self._db.close()
            raise

    def _open(self, version: str, world_size: int) -> None:
        self._db.execute("pragma locking_mode = exclusive")
        self._db.execute("pragma journal_mode = wal")
        self._db.execute("pragma synchronous = off")
        self._db.execute("begin exclusive")
        if not self._db.execute("select count(*) from sqlite_master").fetchone()[0]:
            for statement in _TABLES.split(";"):
                self._db.execute(statement)
            _set(self._db, "format", _FORMAT)
            _set(self._db, "version", version)
            _set(self._db, "world size", world_size)
            _set(self._db, "starts", 0)
            _set(self._db, "last job", 0)
            _set(self._db, "peer key", os.urandom(32))
        elif self._db.execute("pragma quick_check").fetchone()[0] != "ok":
            raise sqlite3.DatabaseError("the file is damaged")
        written = str(self._get("version"))
        if self._get("format") != _FORMAT or written.split(".")[:2] != version.split(".")[:2]:
            raise VersionError(
                "a journal was written by another version of plancompiler",
                got=f"{self.path}: version {written}, format {self._get('format')}",
                expected=f"version {version}, format {_FORMAT}",
                hint="let its jobs end under that version, or start with another --journal",
            )
        if self._get("world size") != world_size:
            raise ClusterError(
                "a journal is of a master with another number of ranks",
                got=f"{self.path}: {self._get('world size')} ranks",
                expected=f"{world_size} ranks",
                hint="start the master with the --ranks of its journal, or with another --journal",
            )
        _set(self._db, "starts", self.starts + 1)
        self._db.execute("commit")

    @property
    def starts(self) -> int:
        """How many masters have used it, this one included."""
        return int(self._get("starts"))

    @property
    def last_job(self) -> int:
        """The highest number of a job so far."""
        return int(self._get("last job"))

    @property
    def peer_key(self) -> bytes:
        """What workers know each other by."""
        return bytes(self._get("peer key"))

    def _get(self, name: str) -> Any:
        row = self._db.execute("select value from about where name = ?", (name,)).fetchone()
        if row is None:
            raise sqlite3.DatabaseError(f"it has no {name}")
        return row[0]

    # --- reading ------------------------------------------------------------------------------

    def workers(self) -> list[Worker]:
        """The workers of an earlier master."""
        with self._explained():
            rows = self._db.execute("select record from worker order by slot").fetchall()
            return [from_json(Worker, record) for (record,) in rows]

    def jobs(self) -> Iterator[KeptJob]:
        """The jobs of an earlier master, in the order in which they came."""
        with self._explained():
            rows = self._db.execute("select * from job order by id").fetchall()
        for job_id, owner, outputs, text, counts, data in rows:
            with self._explained():
                record = from_json(JobRecord, text)
                counted = from_json(_Counts, counts)
                for name in _COUNTS:
                    setattr(record, name, getattr(counted, name))
                names = tuple(map(str, json.loads(outputs)))
                events = tuple(self._events(job_id))
                plans, lines = self._plans(job_id), tuple(self._lines(job_id))
            yield KeptJob(record, owner, names, data, events, plans, lines)

    def _events(self, job_id: int) -> Iterator[JobEvent]:
        reader = Reader(JOB_EVENTS)
        for (data,) in self._db.execute(
            "select message from event where job = ? order by number", (job_id,)
        ):
            event = reader.read(pb.JobEvent.FromString(data))
            if event is not None:
                yield event

    def _plans(self, job_id: int) -> dict[int, Parcel]:
        messages: dict[int, list[bytes]] = {}
        for rank, data in self._db.execute(
            "select rank, message from plan where job = ? order by number", (job_id,)
        ):
            messages.setdefault(rank, []).append(data)
        return {rank: parcel_of(chunks) for rank, chunks in messages.items()}

    def _lines(self, job_id: int) -> Iterator[tuple[int, int, LogLines]]:
        reader = Reader(WORKER_MESSAGES)
        for rank, first, data in self._db.execute(
            "select rank, first, message from line where job = ? order by number", (job_id,)
        ):
            lines = reader.read(pb.WorkerMessage.FromString(data))
            if isinstance(lines, LogLines):
                yield rank, first, lines

    def commands(self, slot: int, after: int) -> list[MasterMessage]:
        """What the worker of a slot was told after so many commands."""
        with self._explained():
            rows = self._db.execute(
                "select message from command where slot = ? and place > ? order by number",
                (slot, after),
            ).fetchall()
            reader = Reader(MASTER_MESSAGES)
            read = [reader.read(pb.MasterMessage.FromString(data)) for (data,) in rows]
        return [message for message in read if message is not None]

    # --- writing ------------------------------------------------------------------------------

    @contextmanager
    def transaction(self) -> Iterator[Writing]:
        """What is written within the block is written as a whole, or not at all; ClusterError where
        that fails.
        """
        with self._explained():
            self._db.execute("begin")
            try:
                yield Writing(self._db)
                self._db.execute("commit")
            except BaseException:
                if self._db.in_transaction:  # SQLite itself takes back what finds its disk full
                    self._db.execute("rollback")
                raise

    def close(self) -> None:
        """Let go of the file."""
        self._db.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Trouble with the file within the block is a ClusterError that names it."""
        try:
            yield
        except sqlite3.OperationalError as error:
            if "locked" not in str(error):
                wrong = "no such" in str(error)  # a table or column
                raise self._unusable(error, _START_ANOTHER if wrong else _FREE_DISK) from error
            raise ClusterError(
                "another master uses this journal",
                got=str(self.path),
                hint="give each master a --journal of its own, or stop the other one",
            ) from None
        except OSError as error:
            raise self._unusable(error.strerror, _NAME_ANOTHER) from error
        except (sqlite3.Error, ValueError, TypeError, KeyError) as error:
            raise self._unusable(error, _START_ANOTHER) from error

    def _unusable(self, why: object, hint: str) -> ClusterError:
        return ClusterError(
            "the master's journal cannot be used", got=f"{self.path}: {why}", hint=hint
        )


class Writing:
    """What can be written within a transaction of the journal."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def add_job(self, job: JobRecord, owner: str, outputs: tuple[str, ...], data: bytes) -> None:
        """A job was submitted."""
        self._db.execute(
            "insert into job values (?, ?, ?, ?, ?, ?)",
            (job.id, owner, json.dumps(outputs), _record(job), _counts(job), data),
        )
        _set(self._db, "last job", job.id)

    def save_job(self, job: JobRecord) -> None:
        """A job has changed."""
        self._db.execute(
            "update job set record = ?, counts = ? where id = ?",
            (_record(job), _counts(job), job.id),
        )

    def save_counts(self, job: JobRecord) -> None:
        """A rank of a job has reported a step."""
        self._db.execute("update job set counts = ? where id = ?", (_counts(job), job.id))

    def add_event(self, job_id: int, event: JobEvent) -> None:
        """Something that readers of a job see."""
        step = event.step if isinstance(event, (RankOutputs, StepDone)) else None
        self._db.executemany(
            "insert into event (job, step, message) values (?, ?, ?)",
            [(job_id, step, each.SerializeToString()) for each in JOB_EVENTS.write(event)],
        )

    def drop_outputs(self, job_id: int, through: int) -> None:
        """The outputs of steps up to this one are kept no longer."""
        self._db.execute("delete from event where job = ? and step <= ?", (job_id, through))

    def forget_jobs(self, job_ids: Iterable[int]) -> None:
        """Jobs that ended long ago."""
        rows = [(job_id,) for job_id in job_ids]
        self._db.executemany("delete from job where id = ?", rows)
        for table in ("event", "plan", "line"):
            self._db.executemany(f"delete from {table} where job = ?", rows)

    def save_plan(self, job_id: int, rank: int, plan: Parcel) -> None:
        """What a rank has made of a job, in place of what it made before."""
        self._db.execute("delete from plan where job = ? and rank = ?", (job_id, rank))
        self._db.executemany(
            "insert into plan (job, rank, message) values (?, ?, ?)",
            [(job_id, rank, message) for message in plan.messages],
        )

    def drop_plans(self, job_id: int) -> None:
        """The plans of a job are kept no longer."""
        self._db.execute("delete from plan where job = ?", (job_id,))

    def add_lines(self, rank: int, first: int, lines: LogLines) -> None:
        """What a rank printed; the number of the first line, or of the first one that is gone."""
        (message,) = WORKER_MESSAGES.write(lines)
        place = first + lines.dropped + len(lines.lines)
        self._db.execute(
            "insert into line (job, rank, first, next, message) values (?, ?, ?, ?, ?)",
            (lines.job_id, rank, first, place, message.SerializeToString()),
        )

    def drop_lines(self, job_id: int, rank: int, before: int) -> None:
        """The lines of a rank before this number are kept no longer."""
        self._db.execute(
            "delete from line where job = ? and rank = ? and next <= ?", (job_id, rank, before)
        )

    def save_worker(self, worker: Worker) -> None:
        """A worker has changed."""
        record = to_json(worker, frozenset({"connection"}))
        self._db.execute("insert or replace into worker values (?, ?)", (worker.slot, record))

    def forget_worker(self, slot: int) -> None:
        """A worker is gone."""
        self._db.execute("delete from worker where slot = ?", (slot,))
        self._db.execute("delete from command where slot = ?", (slot,))

    def add_command(self, slot: int, place: int, message: MasterMessage) -> None:
        """A worker is told something; `place` counts what it was told."""
        self._db.executemany(
            "insert into command (slot, place, message) values (?, ?, ?)",
            [(slot, place, each.SerializeToString()) for each in MASTER_MESSAGES.write(message)],
        )

    def confirm_commands(self, slot: int, through: int) -> None:
        """A worker has so many commands."""
        self._db.execute("delete from command where slot = ? and place <= ?", (slot, through))


def _set(db: sqlite3.Connection, name: str, value: int | str | bytes) -> None:
    db.execute("insert or replace into about values (?, ?)", (name, value))


def _record(job: JobRecord) -> str:
    return to_json(job, _COUNTS | FORGOTTEN)


def _counts(job: JobRecord) -> str:
    return to_json(_Counts(**{name: getattr(job, name) for name in _COUNTS}))


def _make_private(path: Path) -> None:
    """A journal holds what workers prove themselves with, so it is its user's alone."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        about = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    if not stat.S_ISREG(about.st_mode):
        raise ClusterError(
            "the master's journal cannot be used", got=f"{path}: no plain file", hint=_NAME_ANOTHER
        )
    if about.st_mode & 0o077 or about.st_uid != os.getuid():
        raise SecurityError(
            "others could read or change a journal",
            got=f"{path}: mode {about.st_mode & 0o777:03o}, user {about.st_uid}",
            expected=f"mode 600, user {os.getuid()}",
            hint=f"chmod 600 {path}",
        )
