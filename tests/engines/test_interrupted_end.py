"""The end of ranks and engines that Ctrl-C cuts short: the rest of it is done all the same."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import pytest

from plancompiler.engines.hosted import Engine, HostedLauncher
from plancompiler.engines.launcher import Program, StartedRank
from plancompiler.engines.remote_ranks import AgentServer
from plancompiler.engines.supervise import Attempt, Signals
from plancompiler.running.worker_processes import WorkerProcesses


class InterruptedRank(StartedRank):
    """Ctrl-C comes when it is ended."""

    def send(self, number: int) -> None:
        raise KeyboardInterrupt


class Launching:
    """A launcher of such a rank."""

    name = "launching"
    host = "127.0.0.1"

    def __init__(self) -> None:
        self.closed_with: list[str | None] = []

    def start(self, *_: object) -> Sequence[StartedRank]:
        return [InterruptedRank(0, print)]

    def look(self) -> None:
        """All is well."""

    def close(self, error: str | None = None, *, again: bool = False) -> None:
        assert not again
        self.closed_with.append(error)


class Ended(Engine):
    """Knows whether it was ended."""

    name = "ended"
    is_ended = False

    def start(
        self, ranks: int, command: Sequence[str], variables: Sequence[Mapping[str, str]]
    ) -> None:
        """No agents come."""

    def ended(self) -> str | None:
        return None

    def end(self) -> None:
        self.is_ended = True


def test_workers_are_closed() -> None:
    launcher = Launching()
    workers = WorkerProcesses(launcher, "127.0.0.1:1", None, 1)
    with pytest.raises(KeyboardInterrupt):
        workers.close()
    assert launcher.closed_with == [None]


def test_a_launch_is_closed() -> None:
    launcher, signals = Launching(), Signals()
    signals.stop.set()
    with pytest.raises(KeyboardInterrupt):
        Attempt(launcher, Program(("true",), {}), 1, print).run(signals)
    assert launcher.closed_with == [None]


def test_an_engine_and_its_agents_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, stop = Ended(), threading.Event()
    stop.set()
    launcher = HostedLauncher(engine, lambda *_: None, print)
    launcher.start(Program(("true",), {}), 1, print, stop)
    served = [each for each in threading.enumerate() if each.name == "agents"]
    assert served

    def let_go(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(AgentServer, "let_go", let_go)
    with pytest.raises(KeyboardInterrupt):
        launcher.close()
    assert engine.is_ended
    assert not any(each.is_alive() for each in served)
