"""Several hosts, on each of which somebody has started the launcher: one leads, others follow."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from plancompiler.cluster.address import split_address
from plancompiler.cluster.token import find_credential
from plancompiler.engines.agent import Agent, LetGo, Order
from plancompiler.engines.engine_command import EngineCommand
from plancompiler.engines.hosted import Engine, HostedLauncher
from plancompiler.engines.launcher import Program
from plancompiler.errors import EngineError, SecurityError, TransportError, UsageError
from plancompiler.limits import time_limits

NODE_RANKS = ("GROUP_RANK", "SLURM_NODEID", "JOB_COMPLETION_INDEX")
"""Variables in which others number hosts: torchrun, Slurm, Indexed Jobs of Kubernetes."""
_RETRY_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Nodes:
    """The hosts of a run, from the side of one of them."""

    minimum: int
    maximum: int
    endpoint: str
    """Where the host that leads listens, HOST:PORT."""
    secret: str | None
    """None where the one that leads leaves it for other processes of its user."""
    rank: int | None
    """This host's number, where somebody has given it one; number 0 leads."""

    def leads(self) -> bool:
        """Whether this host leads: number 0, or, without numbers, the first on the endpoint's
        host.
        """
        if self.rank is not None:
            return self.rank == 0
        try:
            socket.create_server(split_address(self.endpoint)).close()
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
                return False
            raise EngineError(
                "nobody can listen where the hosts of the run shall meet",
                got=f"{self.endpoint}: {error}",
            ) from None
        return True


def parse_nodes(
    text: str, endpoint: str | None, secret: str | None, rank: int | None
) -> Nodes | None:
    """`--nnodes MIN[:MAX]` with what belongs to it; None for one host. UsageError where they
    contradict each other.
    """
    low, colon, high = text.partition(":")
    if not (low.isdecimal() and (high.isdecimal() or not colon)):
        raise UsageError("--nnodes does not parse", got=repr(text), expected="N or MIN:MAX")
    minimum, maximum = int(low), int(high or low)
    if not 1 <= minimum <= maximum:
        raise UsageError("--nnodes has no hosts", got=text, expected="1 <= MIN <= MAX")
    if maximum == 1 and endpoint is None:
        return None
    if endpoint is None:
        raise UsageError(
            "several hosts need a place to meet",
            got=f"--nnodes {text} without --rdzv-endpoint",
            expected="--rdzv-endpoint HOST:PORT, the same on all of them",
        )
    if secret is None:
        raise UsageError(
            "several hosts need a secret that all of them know",
            got="neither --token-file nor PLANCOMPILER_WORLD_TOKEN",
            hint="python -c 'import secrets; print(secrets.token_hex(32))' > FILE; chmod 600 FILE; "
            "give all hosts --token-file FILE",
        )
    if rank is None:
        rank = _rank_of_environment(maximum)
    if rank is not None and not 0 <= rank < maximum:
        raise UsageError(
            "this host's number is outside of the run",
            got=f"host {rank} of --nnodes {text}",
            expected=f"a number from 0 to {maximum - 1}",
        )
    split_address(endpoint)
    return Nodes(minimum, maximum, endpoint, secret, rank)


def _rank_of_environment(maximum: int) -> int | None:
    for name in NODE_RANKS:
        text = os.environ.get(name, "")
        if text.isdecimal():
            if int(text) >= maximum:
                raise UsageError(
                    "this host's number is outside of the run",
                    got=f"{name}={text} of at most {maximum} hosts",
                    hint=f"give --node-rank, or unset {name}",
                )
            return int(text)
    return None


class Leader(Engine):
    """The host that leads starts an agent of its own; those of the others come by themselves."""

    name = "nodes"

    def __init__(self, local_ranks: int, say: Callable[[str], None]) -> None:
        self.slots = local_ranks
        self._say = say
        self._command: EngineCommand | None = None

    def start(
        self, ranks: int, command: Sequence[str], variables: Sequence[Mapping[str, str]]
    ) -> None:
        self._command = EngineCommand(command, variables[0], self._say)

    def ended(self) -> str | None:
        return None if self._command is None else self._command.ended()

    def end(self) -> None:
        if self._command is not None:
            self._command.end()


def leading_launcher(
    nodes: Nodes,
    local_ranks: int,
    say: Callable[[str], None],
    output: Callable[[int, str], None],
) -> HostedLauncher:
    """The launcher of the host that leads."""
    return HostedLauncher(
        Leader(local_ranks, say),
        output,
        nodes.endpoint,
        secret=nodes.secret,
        minimum=nodes.minimum,
    )


def follow(
    nodes: Nodes,
    program: Program | None,
    local_ranks: int,
    stop: threading.Event,
    on_agent: Callable[[Agent], None] = lambda _: None,
) -> str | None:
    """Run this host's ranks as the leading one says, however often it starts them; why the run has
    ended, None where it has ended well. EngineError where the leader is gone or never comes.

    Without a program it is the leader's. `on_agent` hears of each agent that the leader
    knows by now.
    """
    until = time.monotonic() + time_limits.START_DEADLINE
    while not stop.is_set():
        try:
            secret = nodes.secret or find_credential(nodes.endpoint).secret
            order = Order(
                nodes.endpoint,
                secret,
                nodes.rank,
                local_ranks,
                is_ranked=False,
                agents=nodes.maximum,
            )
            agent = Agent(order, program)
        except (TransportError, SecurityError) as error:
            # A secret that was left by a leader that was killed is another one than that of the
            # next, which replaces it.
            is_final = isinstance(error, SecurityError) and nodes.secret is not None
            if is_final or time.monotonic() > until:
                raise
            stop.wait(_RETRY_SECONDS)
            continue
        threading.Thread(target=_leave, args=(agent, stop), name="leave", daemon=True).start()
        let_go: LetGo | None = agent.run(partial(on_agent, agent))
        if stop.is_set():
            break
        if let_go is None:
            raise EngineError(
                "the host that leads the run is gone, and the ranks of this one were ended",
                got=f"no connection to {nodes.endpoint}",
                expected="the launcher there, until the run ends",
            )
        if not let_go.again:
            return let_go.error
        until = time.monotonic()  # it listens on all the time, unless it is gone
    return None


def _leave(agent: Agent, stop: threading.Event) -> None:
    stop.wait()
    agent.leave()
