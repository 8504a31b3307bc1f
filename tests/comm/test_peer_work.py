"""Ranks that share no memory see whether others work: of their own host, and of others."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from plancompiler.errors import DeadlineError, WireFormatError
from plancompiler.executor.comm import messages
from plancompiler.executor.comm.message_rendezvous import MessageWorldLink
from plancompiler.executor.comm.messages import MessageLink
from plancompiler.executor.comm.patience import Patience
from plancompiler.executor.comm.peer_work import PeerWork
from plancompiler.executor.host_identity import HOST_VARIABLE
from plancompiler.executor.process_status import StoppedProcesses
from tests.comm.test_messages import Wire

DEADLINE = 0.2


def worlds_on(monkeypatch: pytest.MonkeyPatch, *hosts: str) -> dict[int, MessageWorldLink]:
    worlds: dict[int, MessageWorldLink] = {}
    for rank, host in enumerate(hosts):
        monkeypatch.setenv(HOST_VARIABLE, host)
        worlds[rank] = MessageWorldLink(MessageLink(rank, Wire(rank, worlds)), len(hosts), DEADLINE)
    for world in worlds.values():  # now all are there to hear it
        world.link.work.introduce()
    return worlds


@pytest.mark.parametrize("hosts", [("here", "here"), ("here", "there")])
def test_one_that_works_is_waited_for(
    hosts: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    worlds = worlds_on(monkeypatch, *hosts)

    def work() -> None:
        # CPU time, so that a busy machine makes it longer and never shorter.
        end = time.thread_time() + 2 * DEADLINE
        numbers = np.ones(1 << 16, np.float32)
        while time.thread_time() < end:
            numbers.sum()
        worlds[1].rendezvous((0, 1)).publish("a call", (), "showing")

    thread = threading.Thread(target=work)
    thread.start()
    calls = worlds[0].rendezvous((0, 1)).publish("a call", (), "showing")
    thread.join()
    assert [call for call, _ in calls] == ["a call"] * 2


@pytest.mark.parametrize("hosts", [("here", "here"), ("here", "there")])
def test_one_that_stands_still_is_named(
    hosts: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    worlds = worlds_on(monkeypatch, *hosts)
    with pytest.raises(DeadlineError, match=r"within 0.2 s.*not entered: \[1\]"):
        worlds[0].rendezvous((0, 1)).publish("a call", (), "showing")


@pytest.mark.processes
def test_one_of_this_host_that_is_stopped_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    worlds = worlds_on(monkeypatch, "here", "here")
    monkeypatch.setattr(messages, "end_stopped_at_exit", lambda pid: None)
    monkeypatch.setattr(worlds[0].link, "_stopped", StoppedProcesses(0.0))
    worlds[0].deadline = 60.0
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        try:
            process.send_signal(signal.SIGSTOP)
            own = worlds[1].link.work._own
            worlds[1].link.work._own = own._replace(pid=process.pid)
            worlds[1].link.work.introduce()
            with pytest.raises(DeadlineError, match="process of rank 1 does not run") as caught:
                worlds[0].rendezvous((0, 1)).publish("a call", (), "showing")
        finally:
            process.kill()
    assert caught.value.report.rank == 1
    assert "in state T, stopped by a signal" in str(caught.value)


class Talk:
    """What ranks say of their work, brought at once; those that are deaf hear nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *hosts: str) -> None:
        self.deaf: set[int] = set()
        self.ranks: list[PeerWork] = []
        for rank, host in enumerate(hosts):
            monkeypatch.setenv(HOST_VARIABLE, host)
            peers = [peer for peer in range(len(hosts)) if peer != rank]
            self.ranks.append(PeerWork(rank, peers, self.sender(rank)))
        for each in self.ranks:
            each.introduce()

    def sender(self, rank: int):
        def send(peer: int, note: bytes) -> None:
            if peer not in self.deaf:
                self.ranks[peer].receive(rank, note)

        return send

    def ask(self, *ranks: int) -> None:
        patience = Patience(0.0, self.ranks[0].work_of)
        self.ranks[0]._ask_at = 0.0
        self.ranks[0].ask(ranks, patience)


def test_one_that_does_not_answer_is_seen_by_others_of_its_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    talk = Talk(monkeypatch, "here", "there", "there", "alone")
    talk.deaf = {1, 3}
    talk.ask(1, 3)
    assert talk.ranks[0].work_of(1) is not None
    assert talk.ranks[0].work_of(3) is None


def test_what_a_rank_waits_for_and_moves_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that one that waits for a slow one is not taken for one that stands still."""
    talk = Talk(monkeypatch, "a", "b", "c", "d")
    talk.ranks[1].wait([2])
    talk.ranks[2].wait([3, 0])
    talk.ranks[1].move()
    talk.ask(1, 2)
    assert talk.ranks[0].behind([1]) == [1, 2, 3]
    work = talk.ranks[0].work_of(1)
    assert work is not None
    assert work.moved == 1
    talk.ranks[1].wait(())
    talk.ask(1)
    assert talk.ranks[0].behind([1]) == [1]


@pytest.mark.parametrize(
    "note", [b"", b"7", b"[]", b'["process",1,2]', b'["work",[[1]],[]]', b'["work",[[1,"x",0]],[]]']
)
def test_what_makes_no_sense_is_refused(note: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    talk = Talk(monkeypatch, "a", "b")
    with pytest.raises(WireFormatError, match="does not parse"):
        talk.ranks[0].receive(1, note)
