"""The launcher's side of agents: they sign in, and each speaks for its ranks."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from plancompiler.cluster.address import split_address
from plancompiler.engines.control import (
    SILENCE_SECONDS,
    Connection,
    Message,
    check_address,
    secured_server,
    write_program,
)
from plancompiler.engines.launcher import Program, StartedRank
from plancompiler.errors import EngineError
from plancompiler.executor.process_status import StoppedProcesses, process_space
from plancompiler.limits import time_limits

_log = logging.getLogger(__name__)
_BACKLOG = 1024
_STRANGERS = 64
"""Connections at once whose other side has yet to prove that it knows the secret; more wait."""
_PAUSE_SECONDS = 0.1
"""After a connection that could not be taken, as where too many files are open."""
_NAME_SECONDS = 0.2


class RemoteRank(StartedRank):
    """A rank that an agent has started."""

    def __init__(self, rank: int, say: Callable[[str], None], agent: RemoteAgent) -> None:
        super().__init__(rank, say)
        self._agent = agent

    def send(self, number: int) -> None:
        self._agent.connection.send("signal", ranks=[self.rank], number=int(number))


@dataclass(eq=False)
class RemoteAgent:
    """An agent that has signed in."""

    connection: Connection
    rank: int | None
    """The one that its engine has given it."""
    slots: int
    """How many ranks it can start."""
    agents: int | None
    """How many agents the run has at most, as it was told."""
    host: str
    host_id: str
    """Ranks under the same one share memory."""
    pid: int
    space: str
    addresses: list[str]
    """Where its ranks may listen for others."""
    ranks: dict[int, RemoteRank] = field(default_factory=dict)
    gone: threading.Event = field(default_factory=threading.Event)
    said_goodbye: bool = False
    is_lost: bool = False
    """Whether its ranks count as lost, so that nobody waits for what it says."""
    heard: float = field(default_factory=time.monotonic)
    """When it said something last."""


class AgentServer:
    """Takes agents that know the secret, and passes on what they say."""

    def __init__(
        self,
        address: str,
        secret: str,
        output: Callable[[int, str], None],
        on_signal: Callable[[int], None] | None = None,
    ) -> None:
        """`address` is HOST:PORT; port 0 takes any free one. Lines of the ranks' standard output
        go to `output`, and to `on_signal` the signals that other hosts got for the whole run.
        SecurityError for an address that others reach without TLS, EngineError where nobody can
        listen.
        """
        check_address(address)
        self._secret = secret
        self._output = output
        self._on_signal = on_signal
        host, port = split_address(address)
        self._socket = _listening(host, port)
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        self.agents: list[RemoteAgent] = []
        """All that are there."""
        self.left: list[str] = []
        """The hosts of those that were told to end, and do not come again."""
        self.arrived = threading.Condition()
        """Notified when an agent comes or goes."""
        self._watch = StoppedProcesses()
        self._is_closed = threading.Event()
        self._places = threading.BoundedSemaphore(_STRANGERS)
        # A daemon: where Ctrl-C keeps it from being closed, Python would wait for it for ever.
        self._thread = threading.Thread(target=self._accept, name="agents", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no more agents. Those that are there are let go before."""
        self._is_closed.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()

    def let_go(self, error: str | None, *, again: bool) -> None:
        """Have all agents end their ranks and go; with `again` they may come once more."""
        with self.arrived:
            agents = list(self.agents)
        for each in agents:
            each.connection.send("end", error=error, again=again)
            if self._is_here(each):  # a stopped one would not hear it
                with suppress(OSError):
                    os.kill(each.pid, signal.SIGCONT)
        until = time.monotonic() + 2 * time_limits.GRACE
        for each in agents:
            if not each.is_lost:
                each.gone.wait(max(0.0, until - time.monotonic()))
            each.connection.close()

    def look(self) -> None:
        """Note agents of this host that are stopped."""
        with self.arrived:
            here = {each.pid: each for each in self.agents if self._is_here(each)}
        status = self._watch.look(here)
        if status is not None:
            for each in here[status.pid].ranks.values():
                each.trouble = f"of the agent of this rank, {status.stopped_text}"

    def silent_are_lost(self) -> None:
        """A rank has failed: agents that say nothing since are why, so their ranks are lost."""
        with self.arrived:
            agents = list(self.agents)
        for each in agents:
            if time.monotonic() - each.heard > time_limits.QUIET:
                _lost(each)

    @staticmethod
    def _is_here(agent: RemoteAgent) -> bool:
        return bool(agent.space) and agent.space == process_space()

    def start(
        self,
        agent: RemoteAgent,
        places: Mapping[int, Mapping[str, str]],
        common: Mapping[str, str],
        world: str,
        program: Program,
        say: Callable[[str], None],
    ) -> list[RemoteRank]:
        """Have an agent start ranks of the world with this name: the variables of each rank's
        `places` and those that all have in `common`.
        """
        started = [RemoteRank(rank, say, agent) for rank in places]
        agent.ranks |= {each.rank: each for each in started}
        agent.connection.send(
            "start",
            ranks=list(places),
            places=list(places.values()),
            common=common,
            world=world,
            program=write_program(program, self._secret, world),
        )
        if agent.gone.is_set():
            _lost(agent)
        return started

    def _accept(self) -> None:
        while not self._is_closed.is_set():
            if not self._places.acquire(timeout=_PAUSE_SECONDS):
                continue
            try:
                accepted, _ = self._socket.accept()
            except OSError:
                self._places.release()
                self._is_closed.wait(_PAUSE_SECONDS)
                continue
            threading.Thread(target=self._serve, args=(accepted,), daemon=True).start()

    def _prove(self, accepted: socket.socket) -> Connection | None:
        """The connection, once the other side has proved that it knows the secret, in so much time
        and no more; None where it does not. OSError or EOFError where the connection breaks off.
        """
        accepted.settimeout(SILENCE_SECONDS)
        host, port, *_ = accepted.getpeername()
        with accepted.dup() as handle:  # TLS takes the socket itself away
            timer = threading.Timer(SILENCE_SECONDS, _break_off, (handle,))
            timer.daemon = True
            timer.start()
            try:
                connection = Connection(secured_server(accepted, self.address))
                if connection.accept(self._secret):
                    return connection
                _log.warning(
                    "refused a process at %s:%d, which does not know the secret of this run",
                    *(host, port),
                )
                connection.close()
            finally:
                timer.cancel()
                timer.join()
        return None

    def _serve(self, accepted: socket.socket) -> None:
        connection = None
        try:
            connection = self._prove(accepted)
        except (OSError, EOFError):
            accepted.close()
        finally:
            self._places.release()
        if connection is None:
            return
        try:
            agent = _agent_of(connection, connection.receive())
        except (KeyError, TypeError, ValueError):
            connection.close()
            return
        with self.arrived:
            self.agents.append(agent)
            self.arrived.notify_all()
        while (message := connection.receive()) is not None:
            agent.heard = time.monotonic()
            with suppress(KeyError, TypeError, ValueError):
                self._take(agent, message)
        with self.arrived:
            self.agents.remove(agent)
            agent.gone.set()
            self.arrived.notify_all()
        _lost(agent)
        connection.close()

    def _take(self, agent: RemoteAgent, message: Message) -> None:
        kind = message["kind"]
        if kind == "output":
            self._output(int(message["rank"]), str(message["line"]))
        elif kind == "error":
            agent.ranks[int(message["rank"])].heard(str(message["line"]))
        elif kind == "ended":
            code = message["code"]
            agent.ranks[int(message["rank"])].has_ended(
                None if code is None else int(code), str(message["how"])
            )
        elif kind == "beat":
            for rank, text in message["troubles"].items():
                agent.ranks[int(rank)].trouble = f"on {agent.host}, {text}"
        elif kind == "signal" and self._on_signal is not None:
            self._on_signal(signal.Signals(message["number"]))
        elif kind == "leaves":
            self.left.append(agent.host)
            agent.said_goodbye = True
        elif kind == "gone":
            agent.said_goodbye = True


def _break_off(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _listening(host: str, port: int) -> socket.socket:
    """EngineError where nobody can listen. A name that is not known yet, as that of a pod which has
    just started, may become known for some time.
    """
    until = time.monotonic() + time_limits.SILENCE
    while True:
        try:
            return socket.create_server((host, port), backlog=_BACKLOG)
        except OSError as error:
            if isinstance(error, socket.gaierror) and time.monotonic() < until:
                time.sleep(_NAME_SECONDS)  # no event says that a name server has learned a name
                continue
            raise EngineError(
                "nobody can listen where the ranks of the run shall come",
                got=f"{host}:{port}: {error}",
                hint="name another address, of this host, with a free port",
            ) from None


def _agent_of(connection: Connection, hello: Message | None) -> RemoteAgent:
    if hello is None or hello["kind"] != "here":
        raise ValueError
    rank = hello["rank"]
    return RemoteAgent(
        connection,
        None if rank is None else int(rank),
        int(hello["slots"]),
        None if hello["agents"] is None else int(hello["agents"]),
        str(hello["host"]),
        str(hello["host_id"]),
        int(hello["pid"]),
        str(hello["space"]),
        [str(each) for each in hello["addresses"]],
    )


def _lost(agent: RemoteAgent) -> None:
    how = (
        f"its agent on {agent.host} was told to end"
        if agent.said_goodbye
        else f"lost: the agent beside it on {agent.host} ended, or the way to it is cut"
    )
    agent.is_lost = True
    for each in agent.ranks.values():
        each.has_ended(None, how)
