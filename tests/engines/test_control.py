"""Agents and launchers that do not belong together, and engines that are not there."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from plancompiler.engines import mpi
from plancompiler.engines.choice import open_launcher
from plancompiler.engines.control import connect
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


def test_only_those_who_know_the_secret_are_agents(server: AgentServer) -> None:
    with pytest.raises(SecurityError, match="this run's secret"):
        connect(server.address, "a guess", 10)
    known = connect(server.address, "the secret", 10)
    known.send("here", **HELLO)
    with server.arrived:
        assert server.arrived.wait_for(lambda: server.agents, 10)
    known.close()
    with server.arrived:
        assert server.arrived.wait_for(lambda: not server.agents, 10)


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


def test_no_thread_is_left(server: AgentServer) -> None:
    server.close()
    assert not any(each.name == "agents" for each in threading.enumerate())
