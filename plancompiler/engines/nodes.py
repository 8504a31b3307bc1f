"""Several hosts, on each of which somebody has started the launcher: one leads, others follow."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from plancompiler.cluster.address import split_address
from plancompiler.cluster.token import left_credential
from plancompiler.engines.agent import Agent, LetGo, Order
from plancompiler.engines.engine_command import EngineCommand
from plancompiler.engines.hosted import Engine, HostedLauncher
from plancompiler.engines.launcher import Program
from plancompiler.engines.supervise import Signals
from plancompiler.errors import (
    EngineError,
    PlanCompilerError,
    SecurityError,
    TransportError,
    UsageError,
)
from plancompiler.limits import time_limits

NODE_RANKS = ("GROUP_RANK", "SLURM_NODEID", "JOB_COMPLETION_INDEX")
"""Variables in which others number hosts: torchrun, Slurm, Indexed Jobs of Kubernetes."""
_RETRY_SECONDS = 0.2
_LOOK_SECONDS = 0.1


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
    on_signal: Callable[[int], None],
) -> HostedLauncher:
    """The launcher of the host that leads."""
    return HostedLauncher(
        Leader(local_ranks, say),
        output,
        say,
        nodes.endpoint,
        secret=nodes.secret,
        minimum=nodes.minimum,
        on_signal=on_signal,
    )


def follow(
    nodes: Nodes,
    program: Program | None,
    local_ranks: int,
    signals: Signals,
    note: Callable[[str], None],
) -> str | None:
    """Run this host's ranks as the leading one says, however often it starts them; why the run has
    ended, None where it has ended well. EngineError where the leader is gone, TransportError where
    it never comes; `note` hears now and then that this one waits for it.

    Without a program it is the leader's. What is forwarded of `signals` goes to the leader.
    """
    let_go: LetGo | None = LetGo(None, again=True)
    seconds = time_limits.START_DEADLINE
    while let_go is not None and let_go.again:
        agent = _await_leader(nodes, program, local_ranks, signals.stop, seconds, note)
        if agent is None:
            return None
        let_go = _serve(agent, signals)
        if signals.stop.is_set():
            return None
        seconds = 0.0  # it listens on all the time, unless it is gone
    if let_go is None:
        raise EngineError(
            "the host that leads the run is gone, and the ranks of this one were ended",
            got=f"no connection to {nodes.endpoint}",
            expected="the launcher there, until the run ends",
        )
    return let_go.error


def _await_leader(
    nodes: Nodes,
    program: Program | None,
    local_ranks: int,
    stop: threading.Event,
    seconds: float,
    note: Callable[[str], None],
) -> Agent | None:
    """An agent that has reached the leader; None where it is asked to stop before."""
    until = time.monotonic() + seconds
    tell_at = time.monotonic() + time_limits.TELL
    while not stop.is_set():
        trouble: PlanCompilerError = TransportError(
            "the process that leads the run has not come",
            got=f"nobody has left a secret for {nodes.endpoint}",
            expected="the first process, of the same user on this machine, or --token-file",
        )
        left = left_credential(nodes.endpoint) if nodes.secret is None else None
        secret = nodes.secret if left is None else left.secret
        if secret is not None:
            order = Order(
                nodes.endpoint,
                secret,
                nodes.rank,
                local_ranks,
                is_ranked=False,
                agents=nodes.maximum,
            )
            try:
                return Agent(order, program)
            except TransportError as error:
                trouble = error
            except SecurityError as error:
                if left is None:
                    raise
                trouble = error  # a leader that was killed has left it, and the next replaces it
        now = time.monotonic()
        if now > until:
            raise trouble
        if now > tell_at:
            tell_at = now + time_limits.TELL
            note(
                f"plancompiler: waiting for the host that leads the run, at {nodes.endpoint}, "
                f"for {until - now:.0f} s at most: {trouble.report.got}"
            )
        stop.wait(_RETRY_SECONDS)
    return None


def _serve(agent: Agent, signals: Signals) -> LetGo | None:
    """Serve the leader until it lets this host go, and tell it what this host is asked for."""
    over = threading.Event()

    def tell() -> None:
        while not over.wait(_LOOK_SECONDS):
            if signals.stop.is_set():
                agent.leave(for_good=True)
                return
            while signals.forwarded:
                agent.pass_on(signals.forwarded.popleft())

    thread = threading.Thread(target=tell, name="requests")
    try:
        return agent.run(thread.start)
    finally:
        over.set()
        if thread.ident is not None:
            thread.join()
