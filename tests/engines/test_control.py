"""Agents and launchers that do not belong together, and engines that are not there."""

from __future__ import annotations

import os
import re
import resource
import socket
import sys
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from plancompiler.cluster.address import split_address
from plancompiler.engines import mpi, remote_ranks
from plancompiler.engines.choice import open_launcher
from plancompiler.engines.control import connect, read_program, write_program
from plancompiler.engines.hosted import _start_all
from plancompiler.engines.launcher import TRACEBACK, Program
from plancompiler.engines.local import LocalLauncher
from plancompiler.engines.remote_ranks import AgentServer
from plancompiler.errors import EngineError, SecurityError, TransportError, UsageError

HELLO = {
    "rank": 0,
    "slots": 1,
    "agents": None,
    "host": "here",
    "host_id": "here",
    "pid": 0,
    "space": "",
    "addresses": [],
}


@pytest.fixture
def server():
    served = AgentServer("127.0.0.1:0", "the secret", lambda _rank, _line: None)
    yield served
    served.close()


def test_only_those_who_know_the_secret_are_agents(
    server: AgentServer, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(SecurityError, match="this run's secret"):
        connect(server.address, "a guess", 10)
    assert re.search(r"refused a process at 127\.0\.0\.1:\d+", caplog.text)
    known = connect(server.address, "the secret", 10)
    known.send("here", **HELLO)
    with server.arrived:
        assert server.arrived.wait_for(lambda: server.agents, 10)
    known.close()
    with server.arrived:
        assert server.arrived.wait_for(lambda: not server.agents, 10)


def test_strangers_do_not_keep_agents_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither those who say nothing, nor those who say a little now and then."""
    monkeypatch.setattr(remote_ranks, "_STRANGERS", 2)
    monkeypatch.setattr(remote_ranks, "SILENCE_SECONDS", 0.5)
    server = AgentServer("127.0.0.1:0", "the secret", lambda _rank, _line: None)
    over = threading.Event()

    def drip(stranger: socket.socket) -> None:
        with suppress(OSError):
            while not over.wait(0.1):
                stranger.send(b"?")

    with ExitStack() as stack:
        stack.callback(server.close)
        for talks in (True, True, False):
            stranger = stack.enter_context(socket.create_connection(split_address(server.address)))
            if talks:
                thread = threading.Thread(target=drip, args=(stranger,))
                thread.start()
                stack.callback(thread.join)
        stack.callback(over.set)
        connect(server.address, "the secret", 60).close()


def test_a_launcher_whose_files_are_all_open_takes_agents_again(server: AgentServer) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        agent = stack.enter_context(socket.socket())
        lowest_free = os.open(os.devnull, os.O_RDONLY)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
        agent.connect(split_address(server.address))
        agent.settimeout(0.5)
        with suppress(OSError):  # taken before there were no more files, or not
            agent.recv(1)
    connect(server.address, "the secret", 10).close()


def test_what_makes_no_sense_ends_the_connection(server: AgentServer) -> None:
    connection = connect(server.address, "the secret", 10)
    connection.send("here", **(HELLO | {"slots": "many"}))
    assert connection.receive() is None
    connection.close()


def test_a_launcher_that_is_not_there_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(TransportError, match=address):
        connect(address, "the secret", 10)


def test_other_addresses_need_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SecurityError, match=r"in the clear.*PLANCOMPILER_WORLD_TLS_CA"):
        AgentServer("0.0.0.0:0", "the secret", lambda _rank, _line: None)


def test_engines_that_are_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"unknown engine.*'abacus'.*local"):
        open_launcher("abacus", print)
    monkeypatch.setattr(mpi.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(os, "environ", {"PATH": str(tmp_path)})
    with pytest.raises(EngineError, match=r"mpi is not installed.*pip install mpich"):
        open_launcher("mpi", print)


@pytest.mark.parametrize("length", [1, 64, 1000])
def test_a_secret_of_any_length_is_hidden_on_its_way(length: int) -> None:
    program = Program(("python",), secret="s" * length)
    written = write_program(program, "the secret", "a world")
    assert written["secret"] != program.secret.encode().hex()
    assert read_program(written, "the secret", "a world").secret == program.secret


def test_a_world_whose_addresses_fit_into_no_variable(server: AgentServer) -> None:
    hosts = [HELLO | {"host_id": f"host {number}"} for number in range(2)]
    hosts[1]["addresses"] = ["192.168.100.100:40000"] * 8000
    connections = [connect(server.address, "the secret", 10) for _ in hosts]
    for connection, hello in zip(connections, hosts, strict=True):
        connection.send("here", **hello)
    with server.arrived:
        assert server.arrived.wait_for(lambda: len(server.agents) == len(hosts), 10)
    with pytest.raises(EngineError, match=r"world is too large.*PLANCOMPILER_WORLD_ADDRESSES"):
        _start_all(server, server.agents, Program(("python",)), print)
    for connection in connections:
        connection.close()


@pytest.mark.processes
@pytest.mark.parametrize("separator", ["\n", ""])
def test_a_rank_that_goes_on_after_a_traceback_is_not_held_back(separator: str) -> None:
    code = f"""
import sys
print({TRACEBACK!r}, file=sys.stderr)
sys.stderr.write(("x" * 999 + {separator!r}) * 3000)
"""
    said: list[str] = []
    launcher = LocalLauncher(dict(os.environ))
    program = Program((sys.executable, "-c", code))
    (rank,) = launcher.start(program, 1, said.append, threading.Event())
    assert rank.ended.wait(60)
    launcher.close()
    assert rank.code == 0
    assert not rank.held
    assert len("".join(said)) >= 2 << 20
    assert len(rank.last_words) < 50_000


def test_no_thread_is_left(server: AgentServer) -> None:
    server.close()
    assert not any(each.name == "agents" for each in threading.enumerate())
