"""Launchers whose ranks somebody else starts: an engine starts an agent for each rank."""

from __future__ import annotations

import math
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from plancompiler.engines.agent import COMMAND, Order
from plancompiler.engines.launch_variables import (
    ADDRESSES,
    RESTART,
    TOKEN,
    TRANSPORT,
    without_launcher,
    world_variables,
)
from plancompiler.engines.launcher import Program, StartedRank
from plancompiler.engines.remote_ranks import AgentServer, RemoteAgent
from plancompiler.errors import DeadlineError, EngineError
from plancompiler.limits import time_limits

LOOPBACK = "127.0.0.1:0"
_WAIT_SECONDS = 0.1
_MAX_VARIABLE = 1 << 17
"""Bytes, with name, `=` and the zero at its end, that Linux passes on to a program."""


class Engine(ABC):
    """What starts one agent per rank: a command of its own, or a service that is running."""

    name: str
    gives_ranks = False
    """Whether it tells each agent its rank by itself."""
    slots = 1
    """How many ranks each agent of it has."""

    @abstractmethod
    def start(
        self, ranks: int, command: Sequence[str], variables: Sequence[Mapping[str, str]]
    ) -> None:
        """Begin to start agents: `command`, each with its own `variables` (the same for all where
        the engine gives ranks). EngineError where it is not there or cannot start so many.
        """

    @abstractmethod
    def ended(self) -> str | None:
        """How the engine's own part of the run has ended, in words; None while it goes on."""

    def lost(self) -> Mapping[int, str]:
        """The ranks of which it knows that they are gone, sooner maybe than their agents' silence
        says so, each with how.
        """
        return {}

    @abstractmethod
    def end(self) -> None:
        """End it, and what it has started. Safe to call again."""


class HostedLauncher:
    """Ranks of an engine; see `Engine`."""

    def __init__(
        self,
        engine: Engine,
        output: Callable[[int, str], None],
        note: Callable[[str], None],
        address: str = LOOPBACK,
        *,
        secret: str | None = None,
        minimum: int | None = None,
        on_signal: Callable[[int], None] | None = None,
    ) -> None:
        """`address` is where agents reach this process, and `note` hears for which it waits.
        `secret` is for those who come by themselves, as other hosts do; with `minimum` so many
        agents are enough after some time. For `on_signal` see `AgentServer`.
        """
        self.name = engine.name
        self.host = address.rpartition(":")[0]
        self._engine = engine
        self._output = output
        self._note = note
        self._on_signal = on_signal
        self._address = address
        self._secret = secret or secrets.token_hex(32)
        self._minimum = minimum
        self._server: AgentServer | None = None
        self._started: Sequence[StartedRank] = ()

    def start(
        self, program: Program, ranks: int, say: Callable[[str], None], stop: threading.Event
    ) -> Sequence[StartedRank]:
        server = self._server = self._server or self._open_server()
        given = [None if self._engine.gives_ranks else rank for rank in range(ranks)]
        orders = [
            Order(server.address, self._secret, rank, self._engine.slots).variable()
            for rank in given
        ]
        self._engine.start(ranks, COMMAND, orders)
        agents = self._await_agents(server, ranks, stop)
        if agents:
            self._started = _start_all(server, agents, program, say)
        return self._started

    def _open_server(self) -> AgentServer:
        return AgentServer(self._address, self._secret, self._output, self._on_signal)

    def look(self) -> None:
        if self._server is not None:
            self._server.look()
            if any(each.has_failed for each in self._started):
                self._server.silent_are_lost()
        if self._started:
            for rank, how in self._engine.lost().items():
                self._started[rank].has_ended(None, how)

    def close(self, error: str | None = None, *, again: bool = False) -> None:
        # Each part also where Ctrl-C cuts short the one before it.
        with ExitStack() as parts:
            parts.callback(self._engine.end)
            if self._server is not None:
                if not again:
                    parts.callback(self._server.close)
                self._server.let_go(error, again=again)
        if not again:
            self._server = None
        self._started = ()

    def _await_agents(
        self, server: AgentServer, ranks: int, stop: threading.Event
    ) -> list[RemoteAgent]:
        """The agents of all ranks, in order; none where it is asked to stop before they came."""
        until: float | None = None
        count, changed = 0, time.monotonic()
        tell_at = changed + time_limits.TELL
        while not stop.is_set():
            with server.arrived:
                server.arrived.wait(_WAIT_SECONDS)
                agents = list(server.agents)
            _check_count(agents, ranks)
            if len(agents) >= ranks:
                return _in_order(agents)
            if len(agents) != count:
                count, changed = len(agents), time.monotonic()
            if (
                self._minimum is not None
                and count >= self._minimum
                and time.monotonic() - changed > time_limits.LAST_CALL
            ):
                return _in_order(agents)
            if server.left and self._minimum in (None, ranks):
                raise EngineError(
                    "a host or process of the run was told to end, and does not come again",
                    got=f"{len(agents)} of {ranks}; {', '.join(server.left)} left",
                    expected="all, as each has ranks of the world",
                )
            ended = self._engine.ended()
            if ended is not None:
                raise EngineError(
                    f"the engine {self.name} ended before it had started all ranks",
                    got=f"{len(agents)} of {ranks} ranks; {ended}",
                    expected=f"{ranks} ranks",
                    hint="see what it says, and ask it for no more ranks than it can start",
                )
            # Before the first comes the engine may have a queue.
            if until is None and agents:
                until = time.monotonic() + time_limits.START_DEADLINE
            if time.monotonic() > tell_at:
                tell_at = time.monotonic() + time_limits.TELL
                left = "" if until is None else f" for {until - time.monotonic():.0f} s at most"
                self._note(
                    f"plancompiler: {len(agents)} of {ranks} have come from the engine "
                    f"{self.name}; waiting for the others{left}\n"
                )
            if until is not None and time.monotonic() > until:
                came = sorted(each.rank or 0 for each in agents)
                raise DeadlineError(
                    f"not all ranks of the engine {self.name} came",
                    got=f"{came} of {ranks}",
                )
        return []


def _check_count(agents: Sequence[RemoteAgent], count: int) -> None:
    """EngineError where one was told of another number of agents than this launcher."""
    for each in agents:
        if each.agents not in (None, count):
            raise EngineError(
                "the hosts of a run were told different numbers of them",
                got=f"{each.agents} on {each.host}, {count} here",
                expected="the same on all: --nnodes, or WORLD_SIZE of a job",
            )


def _in_order(agents: Sequence[RemoteAgent]) -> list[RemoteAgent]:
    """By the ranks that they were given; those without one behind, as they came."""
    given = [each.rank for each in agents if each.rank is not None]
    twice = {rank for rank in given if given.count(rank) > 1}
    if twice:
        hosts = [each.host for each in agents if each.rank in twice]
        raise EngineError(
            "several agents say that they are the same one",
            got=f"number {min(twice)} on {', '.join(hosts)}",
            expected="a number of its own for each",
            hint="give each host another --node-rank, or none to any; and each process of a job "
            "another RANK",
        )
    return sorted(agents, key=lambda each: math.inf if each.rank is None else each.rank)


def _start_all(
    server: AgentServer,
    agents: Sequence[RemoteAgent],
    program: Program,
    say: Callable[[str], None],
) -> list[StartedRank]:
    """Have the agents start their ranks, in this order, all in one world."""
    size = sum(each.slots for each in agents)
    # Agents may have the program from their own hosts, but not this.
    common = _transport(agents) | {RESTART: program.environment.get(RESTART, "0")}
    world = secrets.token_hex(16)
    started: list[StartedRank] = []
    here: dict[str, int] = {}
    local_sizes: dict[str, int] = {}
    for agent in agents:
        local_sizes[agent.host_id] = local_sizes.get(agent.host_id, 0) + agent.slots
    for agent in agents:
        places = {}
        for rank in range(len(started), len(started) + agent.slots):
            local = here[agent.host_id] = here.get(agent.host_id, -1) + 1
            places[rank] = world_variables(rank, size, local, local_sizes[agent.host_id])
        started += server.start(agent, places, common, world, program, say)
    return started


def _transport(agents: Sequence[RemoteAgent]) -> dict[str, str]:
    """What carries the ranks' data: nothing needs to be said where they share memory."""
    if len({each.host_id for each in agents}) == 1:
        return {}
    addresses = ",".join(address for each in agents for address in each.addresses)
    if len(ADDRESSES) + len(addresses) + 2 > _MAX_VARIABLE:
        raise EngineError(
            "the world is too large: the addresses of all ranks do not fit into a variable",
            got=f"{len(addresses)} bytes",
            expected=f"less than {_MAX_VARIABLE} in {ADDRESSES}",
            hint="use fewer ranks",
        )
    return {TRANSPORT: "grpc", ADDRESSES: addresses}


def working_folder() -> str:
    """Where the ranks of services start: as this process. EngineError where it is gone."""
    try:
        return str(Path.cwd())
    except OSError as error:
        raise EngineError(
            "the folder in which this process was started is gone",
            got=str(error.strerror),
            expected="a folder, in which ranks start on all hosts",
            hint="change into a folder that exists",
        ) from None


def engine_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables for an engine's own command, from this process's."""
    return {name: text for name, text in without_launcher(environment).items() if name != TOKEN}
