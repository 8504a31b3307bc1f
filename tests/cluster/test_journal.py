"""The journal of a master: what is written can be read, and nothing else is taken for one."""

from __future__ import annotations

import os
import resource
import sqlite3
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from plancompiler.cluster.chunks import pack
from plancompiler.cluster.messages import (
    Abort,
    Compile,
    JobPhase,
    JobRequest,
    LogLine,
    LogLines,
    PhaseChanged,
    RankOutputs,
    Register,
    Run,
    Save,
    StepDone,
)
from plancompiler.errors import ClusterError, ErrorReport, SecurityError, VersionError
from plancompiler.master.journal import GRAPH, Journal, Writing
from plancompiler.master.record_json import from_json, to_json
from plancompiler.master.records import JobRecord, Worker
from plancompiler.master.saving import Saving

REPORT = ErrorReport("E180", "it broke", rank=1, hint="mend it")


def full_job() -> JobRecord:
    """A job in the middle of everything."""
    job = JobRecord(7, "job", JobRequest(9, save="folder", save_every=2), "token", 2, 3.5)
    job.slots, job.phase, job.started = (3, 1), JobPhase.RUNNING, 4.25
    job.waiting, job.digests = {0, 1}, {0: "a", 1: "b"}
    job.reporters, job.reported = {0}, {5: {0}}
    job.current = Run(7, 11, 2, False)
    job.operations = deque([Save(7, 12, "folder", True), Run(7, 13, 7, False)])
    job.saving = Saving(Save(7, 10, "folder", True), {1}, 5.0, indexing=True)
    job.run_errors, job.error = [REPORT], REPORT
    assert job.counts.came(0, 4, 2, ()) is None
    return job


def test_records_are_read_as_they_were_written() -> None:
    job = full_job()
    assert from_json(JobRecord, to_json(job)) == job
    worker = Worker(
        3, Register(3, "host", "cpu", "1.0", deadline=2.0), 1.5, 9, b"\x00\xff", 4, 5, 7, 1
    )
    assert from_json(Worker, to_json(worker)) == worker


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"id": "x"}', '{"phase": "nowhere"}'])
def test_a_text_that_is_no_record_is_refused(text: str) -> None:
    with pytest.raises((ValueError, TypeError, KeyError, AttributeError)):
        from_json(JobRecord, text)


def test_what_is_written_is_there_for_the_next_master(tmp_path: Path) -> None:
    job, path = full_job(), tmp_path / "journal"
    events = [PhaseChanged(JobPhase.RUNNING, 1.5), RankOutputs(4, 0, b"4" * 300), StepDone(4)]
    worker = Worker(3, Register(3, "host", "cpu", "1.0"), 1.5, 9, b"token", commands=3)
    commands = [Compile(7, "naive", 0, 2, True, b"d" * 32), Run(7, 11, 2, False), Abort(7, REPORT)]
    journal = Journal(path, "1.2.3", 4)
    key = journal.peer_key
    plan, graph = pack(bytes(3 << 20)), pack(b"graph", compress=True)
    lines = [LogLines(7, (LogLine(1.5, "stdout", f"{number}"),), 2) for number in range(3)]
    with journal.transaction() as writing:
        writing.add_job(job, "user", ("loss",), b"data")
        for rank, parcel in ((0, graph), (0, plan), (GRAPH, graph)):
            writing.save_plan(job.id, rank, parcel)
        for number, each in enumerate(lines):
            writing.add_lines(1, 3 * number, each)
        writing.drop_lines(job.id, 1, 3)
        for event in (*events, RankOutputs(5, 0, b"5"), StepDone(5)):
            writing.add_event(job.id, event)
        writing.save_worker(worker)
        for place, command in enumerate(commands, 1):
            writing.add_command(worker.slot, place, command)
    job.counts.came(0, 5, 2, ())
    with journal.transaction() as writing:
        writing.save_counts(job)
        writing.drop_outputs(job.id, 4)
    journal.close()
    again = Journal(path, "1.2.9", 4)
    assert (again.starts, again.last_job, again.peer_key) == (2, 7, key)
    (kept,) = again.jobs()
    assert (kept.owner, kept.outputs, kept.data) == ("user", ("loss",), b"data")
    assert kept.events == (events[0], RankOutputs(5, 0, b"5"), StepDone(5))
    assert kept.record == job
    assert kept.plans == {0: plan, GRAPH: graph}
    assert kept.lines == ((1, 3, lines[1]), (1, 6, lines[2]))
    (back,) = again.workers()
    assert (back.slot, back.token, back.connection) == (3, b"token", 0)
    assert again.commands(3, 1) == commands[1:]
    with again.transaction() as writing:
        writing.confirm_commands(3, 2)
    assert again.commands(3, 0) == commands[2:]
    with again.transaction() as writing:
        writing.forget_jobs([job.id])
        writing.forget_worker(3)
    assert list(again.jobs()) == again.workers() == again.commands(3, 0) == []
    again.close()


def write_half(journal: Journal) -> None:
    with journal.transaction() as writing:
        writing.add_job(full_job(), "user", ("loss",), b"data")
        raise ZeroDivisionError


def test_what_fails_in_between_is_not_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", "1.2.3", 4)
    with pytest.raises(ZeroDivisionError):
        write_half(journal)
    assert list(journal.jobs()) == []
    journal.close()


@contextmanager
def with_full_disk() -> Iterator[None]:
    """Within the block no file of this process can be written."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def write(journal: Journal, change: Callable[[Writing], None]) -> None:
    with journal.transaction() as writing:
        change(writing)


@pytest.mark.parametrize(
    "change",
    [
        lambda writing: writing.add_event(7, StepDone(2)),
        lambda writing: writing.drop_outputs(7, 1),
        lambda writing: writing.forget_jobs([7]),
        lambda writing: writing.confirm_commands(3, 1),
        lambda writing: writing.add_lines(0, 0, LogLines(7, (LogLine(1.0, "stdout", "x"),))),
        lambda writing: writing.save_plan(7, 0, pack(b"plan")),
    ],
    ids=["add an event", "drop outputs", "forget a job", "confirm a command", "lines", "plan"],
)
def test_a_journal_that_cannot_be_written_says_so_and_can_be_once_there_is_room(
    tmp_path: Path, change: Callable[[Writing], None]
) -> None:
    journal = Journal(tmp_path / "journal", "1.2.3", 4)
    with journal.transaction() as writing:
        writing.add_job(full_job(), "user", ("loss",), b"data")
        writing.add_event(7, StepDone(1))
        writing.add_command(3, 1, Run(7, 11, 2, False))
    for _ in range(2):
        with pytest.raises(ClusterError, match="cannot be used") as caught, with_full_disk():
            write(journal, change)
        assert str(tmp_path / "journal") in str(caught.value.report.got)
        assert "transaction" not in str(caught.value.report.got)
        assert "free its disk" in str(caught.value.report.hint)
    (kept,) = journal.jobs()
    assert kept.events == (StepDone(1),)
    assert len(journal.commands(3, 0)) == 1
    write(journal, change)
    journal.close()


def test_two_masters_cannot_use_one_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", "1.2.3", 1)
    with pytest.raises(ClusterError, match="another master"):
        Journal(tmp_path / "journal", "1.2.3", 1)
    journal.close()
    Journal(tmp_path / "journal", "1.2.3", 1).close()


@pytest.mark.parametrize(
    ("version", "ranks", "error"), [("1.3.0", 1, VersionError), ("1.2.3", 2, ClusterError)]
)
def test_a_journal_of_another_version_or_size_is_refused(
    tmp_path: Path, version: str, ranks: int, error: type[Exception]
) -> None:
    Journal(tmp_path / "journal", "1.2.3", 1).close()
    with pytest.raises(error):
        Journal(tmp_path / "journal", version, ranks)


def test_a_journal_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    Journal(path, "1.2.3", 1).close()
    database = sqlite3.connect(path)
    database.execute("update about set value = value - 1 where name = 'format'")
    database.commit()
    database.close()
    with pytest.raises(VersionError, match="another version"):
        Journal(path, "1.2.3", 1)


@pytest.mark.parametrize("damage", ["cut", "other", "rows", "table"])
def test_a_damaged_journal_is_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "journal"
    journal = Journal(path, "1.2.3", 1)
    with journal.transaction() as writing:
        writing.add_job(full_job(), "user", ("loss",), b"data")
    journal.close()
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:5000])
    elif damage == "other":
        path.write_bytes(b"no database" * 1000)
    else:
        database = sqlite3.connect(path)
        database.execute("drop table job" if damage == "table" else "update job set record = '{'")
        database.commit()
        database.close()
    with pytest.raises(ClusterError, match="cannot be used") as caught:
        list(Journal(path, "1.2.3", 1).jobs())
    assert "start the master with another --journal" in str(caught.value.report.hint)


def test_a_journal_that_can_be_no_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere" / "journal", Path(os.devnull)):
        with pytest.raises(ClusterError, match="cannot be used") as caught:
            Journal(path, "1.2.3", 1)
        assert str(caught.value.report.got).count(str(path)) == 1
        assert "name a file of this user" in str(caught.value.report.hint)


def test_a_journal_that_others_could_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.touch(0o644)
    with pytest.raises(SecurityError, match="others"):
        Journal(path, "1.2.3", 1)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ClusterError):
        Journal(tmp_path / "link", "1.2.3", 1)
