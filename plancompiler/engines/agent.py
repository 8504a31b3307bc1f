"""The process that an engine starts for each rank: it starts the rank as its child, tells the
launcher what becomes of it, and ends it when the launcher is gone.

It is small, and no work of the rank's holds it up: that it says something is the sign that the
rank's host lives.
"""

from __future__ import annotations

import hmac
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from plancompiler.engines.control import Connection, connect, read_program
from plancompiler.engines.launch_variables import TOKEN, read_launcher
from plancompiler.engines.launcher import Program
from plancompiler.engines.local import LocalLauncher, LocalRank
from plancompiler.errors import PlanCompilerError
from plancompiler.executor.host_identity import HOST_VARIABLE, host_id
from plancompiler.executor.process_status import process_space
from plancompiler.limits import time_limits

ORDER = "PLANCOMPILER_AGENT"
"""The variable in which an agent finds its `Order`, as JSON."""
COMMAND = (sys.executable, "-m", "plancompiler.engines.agent")
"""What an engine runs for each rank. Hosts without this Python at this path cannot be used."""
_BEAT_SECONDS = 0.5
_REACH_SECONDS = time_limits.SILENCE


@dataclass(frozen=True, slots=True)
class Order:
    """What an agent needs to reach its launcher, which then tells it what to start."""

    address: str
    secret: str
    rank: int | None
    """Without one the engine tells each agent its own, unless it `is_ranked` by nobody."""
    ranks: int = 1
    """How many ranks it can start."""
    is_ranked: bool = True
    agents: int | None = None
    """How many agents the run has at most, where somebody has told this one."""

    def variable(self) -> dict[str, str]:
        """It, for the environment of an agent."""
        return {ORDER: json.dumps(asdict(self))}


@dataclass(frozen=True, slots=True)
class LetGo:
    """What a launcher says when it lets an agent go."""

    error: str | None
    """Why the run has ended; None where it has ended well."""
    again: bool
    """Whether the ranks will be started once more."""


class Agent:
    """Serves one launcher until that lets it go, or is gone."""

    def __init__(self, order: Order, program: Program | None = None) -> None:
        """Without a program its ranks run the one that the launcher names."""
        self._order = order
        self._program = program
        self._launcher = LocalLauncher(dict(os.environ), self._said, holds=False)
        self._started: Sequence[LocalRank] = ()
        self._over = threading.Event()
        self._connection: Connection = connect(order.address, order.secret, _REACH_SECONDS)

    def run(self, on_greeted: Callable[[], None] = lambda: None) -> LetGo | None:
        """Until the launcher lets this agent go; None where it is gone. `on_greeted` is called once
        the launcher has been told who this is: it takes nothing else before.
        """
        order = self._order
        rank = order.rank
        if rank is None and order.is_ranked:
            rank = read_launcher(os.environ).rank
        self._connection.send(
            "here",
            rank=rank,
            slots=order.ranks,
            agents=order.agents,
            host=socket.gethostname(),
            host_id=host_id(os.environ.get(HOST_VARIABLE, "")),
            pid=os.getpid(),
            space=process_space(),
            addresses=_free_addresses(self._connection.own_host, order.ranks),
        )
        on_greeted()
        beats = threading.Thread(target=self._beat, name="beats", daemon=True)
        beats.start()
        try:
            return self._serve()
        finally:
            self._over.set()
            self._end()
            self._connection.send("gone")
            self._connection.close()
            beats.join()

    def leave(self, *, for_good: bool = False) -> None:
        """End everything; the engine wants this agent to go, or (`for_good`) the user does, and it
        does not come again.
        """
        if for_good:
            self._connection.send("leaves")
        self._connection.close()

    def pass_on(self, number: int) -> None:
        """A signal that this agent's host got and that is for the whole run. Only once the launcher
        has been greeted.
        """
        self._connection.send("signal", number=number)

    def _serve(self) -> LetGo | None:
        while (message := self._connection.receive()) is not None:
            kind = message["kind"]
            if kind == "start":
                world = str(message["world"])
                program = self._program or read_program(
                    message["program"], self._order.secret, world
                )
                common: Mapping[str, str] = message["common"]
                places = [{**common, **each} for each in message["places"]]
                self._start(program, message["ranks"], places, world)
            elif kind == "signal":
                for each in self._started:
                    if each.rank in message["ranks"] and not each.ended.is_set():
                        each.send(int(message["number"]))
            elif kind == "end":
                return LetGo(message["error"], bool(message["again"]))
        return None

    def _start(
        self,
        program: Program,
        ranks: Sequence[int],
        variables: Sequence[Mapping[str, str]],
        world: str,
    ) -> None:
        # Who hears the world's name on its way does not know its token.
        secret = self._order.secret.encode()
        token = hmac.digest(secret, b"world:" + world.encode(), "sha256").hex()
        variables = [{**each, TOKEN: token} for each in variables]
        try:
            with _ignoring(() if program.handles_signals else (signal.SIGUSR1,)):
                self._started = self._launcher.start_some(program, ranks, variables, self._error)
        except OSError as error:
            for rank in ranks:
                self._connection.send("ended", rank=rank, code=None, how=f"not started: {error}")
            return
        for each in self._started:
            threading.Thread(target=self._tell_end, args=(each,), daemon=True).start()

    def _tell_end(self, started: LocalRank) -> None:
        started.ended.wait()
        self._connection.send("ended", rank=started.rank, code=started.code, how="")

    def _said(self, rank: int, line: str) -> None:
        self._connection.send("output", rank=rank, line=line)

    def _error(self, rank: int, line: str) -> None:
        self._connection.send("error", rank=rank, line=line)

    def _beat(self) -> None:
        while not self._over.wait(_BEAT_SECONDS):
            self._launcher.look()
            troubles = {each.rank: each.trouble for each in self._started if each.trouble}
            self._connection.send("beat", troubles=troubles)

    def _end(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            running = [each for each in self._started if not each.ended.is_set()]
            for each in running:
                each.send(number)
            until = time.monotonic() + time_limits.GRACE
            for each in running:
                each.ended.wait(max(0.0, until - time.monotonic()))
        self._launcher.close()


@contextmanager
def _ignoring(numbers: Sequence[signal.Signals]) -> Iterator[None]:
    """What is started within the block ignores these signals."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _free_addresses(host: str, count: int) -> list[str]:
    """Where ranks of this agent may listen for others: ports that nobody had a moment ago."""
    listening = [socket.create_server((host, 0)) for _ in range(count)]
    addresses = [f"{host}:{each.getsockname()[1]}" for each in listening]
    for each in listening:
        each.close()
    return addresses


def _leave_with_stdin(agent: Agent) -> None:
    """The engine's process that has started this one holds the other end."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        agent.leave()

    threading.Thread(target=watch, name="stdin", daemon=True).start()


def main() -> int:
    """Run one agent; its variable says what for."""
    try:
        agent = Agent(Order(**json.loads(os.environ.pop(ORDER))))
    except PlanCompilerError as error:
        sys.stderr.write(f"plancompiler: the agent of a rank: {error}\n")
        return 1
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: agent.leave())
    # The ranks have what this process blocks, and it may have been started where that is blocked.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    # The launcher sends it to those that are meant; engines send it to everything of theirs.
    signal.signal(signal.SIGUSR1, lambda *_: None)
    if "--with-stdin" in sys.argv:
        _leave_with_stdin(agent)
    agent.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
