"""What ranks print and raise, as the master keeps it and clients read it."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

import plancompiler as pc
from plancompiler.cli.program import cli
from plancompiler.cluster.messages import LogLine, LogLines, RankLine
from plancompiler.errors import (
    ClusterError,
    ExecutionError,
    PlanCompilerError,
    UsageError,
    WorkerLostError,
)
from plancompiler.master.kept_log import KeptLog
from plancompiler.master.server import MasterServer
from plancompiler.ops.registry import allow_custom_ops
from plancompiler.running.client import Client
from plancompiler.worker.job_log import HELD_BYTES, JobLog
from tests.cluster.conftest import eventually

SECONDS = 60.0
OPS = """
import os, sys
import plancompiler as pc


@pc.op(rule="n -> n")
def chatty(x):
    print("a kernel in Python")
    os.write(1, b"a kernel in C\\n")
    os.write(2, b"\\x1b[31mred\\n")
    return x


@pc.op(rule="n -> n")
def failing(x):
    raise ZeroDivisionError("of the user's own")


@pc.op(rule="n -> n")
def crashing(x):
    os.write(2, b"last words\\n")
    os.kill(os.getpid(), 9)


@pc.op(rule="n -> n")
def endless(x):
    for _ in range(4_000):
        os.write(1, b"again and again, " * 12 + b"\\n")
    return x
"""


def lines(*texts: str, dropped: int = 0, job_id: int = 1) -> LogLines:
    return LogLines(job_id, tuple(LogLine(0.0, "stdout", text) for text in texts), dropped)


def read(log: KeptLog, rank: int | None = None, *, follow: bool = False) -> list[RankLine]:
    async def all_lines() -> list[RankLine]:
        return [line async for batch in log.read(rank, follow) for line in batch]

    return asyncio.run(all_lines())


def test_a_master_keeps_the_latest_lines_of_each_rank_and_counts_the_others() -> None:
    async def scenario() -> None:
        log = KeptLog(2, limit=2 * (16 << 10))
        log.add(0, lines("only"))
        for number in range(200):
            log.add(1, lines(f"{number} " + "x" * 1000))
        shown = [line async for batch in log.read(None, False) for line in batch]
        assert shown[0].text == "only"
        assert shown[1].dropped == 200 - (len(shown) - 2)
        assert [line.text.split()[0] for line in shown[2:]] == [
            str(number) for number in range(shown[1].dropped, 200)
        ]
        assert log.held_bytes <= 2 * (16 << 10)
        log.add(1, lines("after", dropped=7))
        last = [line async for batch in log.read(1, False) for line in batch][-2:]
        assert [(line.dropped, line.text) for line in last] == [(7, ""), (0, "after")]
        log.forget()
        gone = [line async for batch in log.read(1, False) for line in batch]
        assert [line.dropped for line in gone] == [208]

    asyncio.run(scenario())


def test_who_follows_hears_each_line_once_until_the_ranks_have_let_go() -> None:
    async def scenario() -> list[str]:
        log = KeptLog(1)
        log.add(0, lines("before"))
        heard: list[str] = []

        async def follow() -> None:
            async for batch in log.read(None, True):
                heard.extend(line.text for line in batch)
                said.set()

        said = asyncio.Event()
        reader = asyncio.create_task(follow())
        for text in ("one", "two"):
            await asyncio.wait_for(said.wait(), SECONDS)
            said.clear()
            log.add(0, lines(text))
        await asyncio.wait_for(said.wait(), SECONDS)
        log.add(0, lines("last"))
        log.close()
        await asyncio.wait_for(reader, SECONDS)
        return heard

    assert asyncio.run(scenario()) == ["before", "one", "two", "last"]


def test_a_worker_holds_so_many_bytes_and_sends_so_many_a_second() -> None:
    log = JobLog()
    log.add("stdout", "of no job")
    assert log.take() == []
    log.begin(3, 0, 1000)
    for _ in range(3):
        for number in range(10_000):
            log.add("stdout", f"{number}")
        assert log._held <= HELD_BYTES
    sent = log.take()
    assert {each.job_id for each in sent} == {3}
    count = sum(len(each.lines) + each.dropped for each in sent)
    assert count == 30_000
    assert sent[-1].lines[-1].text == "9999"
    for number in range(10_000):
        log.add("stdout", f"{number}")
    sent = log.take() + log.take()  # a rank of a thousand may send 2 KiB a second
    assert len(sent) <= 1
    assert log.wait()
    log.close()
    assert not log.wait()


def test_a_line_of_a_job_is_not_one_of_the_next() -> None:
    log = JobLog()
    for job_id in (1, 2):
        log.begin(job_id)
        log.add("stderr", f"of {job_id}")
    assert [(each.job_id, each.lines[0].text) for each in log.take()] == [(1, "of 1"), (2, "of 2")]


def test_records_of_a_worker_name_job_and_rank() -> None:
    log = JobLog()
    record = logging.LogRecord("theirs", logging.WARNING, "", 0, "text", (), None)
    assert log.name_place(record)
    assert not hasattr(record, "job")
    log.begin(3, 2, 4)
    assert log.name_place(record)
    assert (record.__dict__["job"], record.__dict__["rank"]) == (3, 2)


@pytest.mark.processes
def test_what_is_written_to_the_descriptors_is_heard_and_goes_on() -> None:
    """In another process: this one's streams are pytest's."""
    program = """
import os, subprocess, sys, threading
from plancompiler.worker.captured_streams import captured_streams
heard = []
with captured_streams(lambda stream, text: heard.append((stream, text))) as streams:
    print("Python")
    os.write(2, b"half a ")
    os.write(2, b"line\\n10%\\r100%\\nnot utf-8 \\xff\\n")
    subprocess.run(["sh", "-c", "echo a program"])
    streams.drain()
    assert len(heard) == 5, heard
    done = threading.Event()
    def flood():
        while not done.is_set():
            os.write(1, b"flood\\n" * 100)
    thread = threading.Thread(target=flood)
    thread.start()
    streams.drain()
    done.set()
    thread.join()
    sys.stdout.write("no end")
print("afterwards")
assert sorted(heard[:5]) == [
    ("stderr", "100%"), ("stderr", "half a line"), ("stderr", "not utf-8 \\ufffd"),
    ("stdout", "Python"), ("stdout", "a program"),
], heard
assert heard[-1] == ("stdout", "no end"), heard[-1]
assert ("stdout", "afterwards") not in heard
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=False, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"Python\na program\n")
    assert done.stdout.endswith(b"flood\nno endafterwards\n")
    assert done.stderr == b"half a line\n10%\r100%\nnot utf-8 \xff\n"


@pytest.mark.processes
def test_a_line_is_not_cut_where_lines_are_sent_while_it_is_printed() -> None:
    """An unbuffered `print` writes a line and its end apart."""
    program = """
import sys
from plancompiler.worker.captured_streams import captured_streams
from plancompiler.worker.job_log import JobLog
log = JobLog()
log.begin(1)
with captured_streams(log.add) as log.streams:
    sys.stdout.write("its text")
    sys.stdout.flush()
    assert log.take() == []
    sys.stdout.write(" and its end\\nno end")
    sys.stdout.flush()
    def texts(**options):
        return [line.text for lines in log.take(**options) for line in lines.lines]
    assert texts() == ["its text and its end"]
    assert texts(work_has_ended=True) == ["no end"]
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=False, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr


@contextmanager
def worker_process(address: str, folder: Path, module: str) -> Iterator[subprocess.Popen[bytes]]:
    """`plancompiler worker`, whose words are kept by its own terminal, a file, too."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    command = [sys.executable, "-m", "plancompiler", "worker", "--master", address]
    with (folder / "terminal").open("wb") as terminal:
        worker = subprocess.Popen(
            [*command, "--allow-ops", module],
            stdout=terminal,
            stderr=subprocess.STDOUT,
            env=environment,
        )
    try:
        yield worker
    finally:
        worker.terminate()
        worker.wait(SECONDS)


@pytest.mark.processes
def test_logs_of_a_jobs_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "ops_that_print"
    (tmp_path / f"{module}.py").write_text(OPS)
    monkeypatch.syspath_prepend(str(tmp_path))
    allow_custom_ops(module)
    import ops_that_print as ops

    def job(op: pc.Tensor) -> pc.Job:
        with pc.job("talks") as traced:
            ones = pc.ones((4,), "float32", pc.Placement("cpu", [0]))
            pc.output("loss", op(ones).sum())
        return traced

    journal = tmp_path / "journal"
    with MasterServer(journal=journal) as server, Client(server.address) as client:
        chatty, failing, endless = (
            client.submit(job(each), 2) for each in (ops.chatty, ops.failing, ops.endless)
        )
        followed: list[RankLine] = []
        reader = threading.Thread(target=lambda: followed.extend(chatty.logs(follow=True)))
        reader.start()
        with worker_process(server.address, tmp_path, module):
            chatty.result()
            reader.join(SECONDS)
            expected = ["a kernel in Python", "a kernel in C", "\x1b[31mred"] * 2
            assert sorted(line.text for line in followed) == sorted(expected)
            assert list(chatty.logs()) == list(chatty.logs(0)) == followed
            with pytest.raises(UsageError, match="no such rank"):
                list(chatty.logs(1))
            with pytest.raises(ClusterError, match="no such job"):
                list(client.logs(99))
            with pytest.raises(ExecutionError, match="of the user's own"):
                failing.result()
            trace = [line.text for line in failing.logs()]
            assert any("in failing" in text for text in trace), trace
            assert "ZeroDivisionError: of the user's own" in trace
            endless.result()
            kept = list(client.logs(endless.job_id, follow=True))
            assert sum(line.dropped or 1 for line in kept) == 8_000
            assert any(line.dropped for line in kept)
            crashing = client.submit(job(ops.crashing), 1)
            with pytest.raises(WorkerLostError):
                crashing.result()
            eventually(
                lambda: (
                    bool(client.status())
                    and (tmp_path / "terminal").read_bytes().endswith(b"last words\n")
                )
            )
        shown = CliRunner().invoke(
            cli, ["logs", str(chatty.job_id), "--master", server.address], catch_exceptions=False
        )
        assert "!\\x1b[31mred" in shown.stdout
        as_json = CliRunner().invoke(
            cli, ["logs", str(chatty.job_id), "--master", server.address, "--json"]
        )
        assert [json.loads(line)["text"] for line in as_json.stdout.splitlines()] == [
            line.text for line in followed
        ]
        before = [list(client.logs(each.job_id)) for each in (chatty, failing, endless)]
    with MasterServer(journal=journal) as server, Client(server.address) as client:
        after = [list(client.logs(each.job_id)) for each in (chatty, failing, endless)]
        assert after == before
    terminal = (tmp_path / "terminal").read_text()
    assert terminal.count("a kernel in C\n") == 2
    assert terminal.count("again and again, \n") == 8_000
    assert "ZeroDivisionError: of the user's own" in terminal


def test_a_worker_in_a_thread_keeps_tracebacks(cluster: MasterServer) -> None:
    error = PlanCompilerError("said in full")
    log = JobLog()
    log.begin(1)
    log.add_error(error)
    assert log.take() == []
    error.__cause__ = KeyError("theirs")
    log.add_error(error)
    (sent,) = log.take()
    assert sent.lines[-1].text.endswith("said in full.")
    assert any("KeyError" in line.text for line in sent.lines)
