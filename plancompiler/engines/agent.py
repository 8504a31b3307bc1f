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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from plancompiler.engines.control import Connection, connect
from plancompiler.engines.launch_variables import TOKEN, read_launcher
from plancompiler.engines.launcher import Program
from plancompiler.engines.local import LocalLauncher, LocalRank
from plancompiler.errors import PlanCompilerError
from plancompiler.executor.host_identity import HOST_VARIABLE, host_id
from plancompiler.executor.process_status import process_space
from plancompiler.limits import time_limits

ORDER = "PLANCOMPILER_AGENT"
"""The variable in which an agent finds what it needs: an `Order` as JSON."""
COMMAND = (sys.executable, "-m", "plancompiler.engines.agent")
"""What an engine runs for each rank. Hosts without this Python at this path cannot be used."""
LINE_CHARACTERS = 100_000
"""Longer lines are passed on in pieces."""
_BEAT_SECONDS = 0.5
_REACH_SECONDS = time_limits.SILENCE


def order_of(
    address: str, secret: str, program: Program, rank: int | None, *, is_ranked: bool = True
) -> dict[str, Any]:
    """What an agent needs. Without a rank the engine tells each its own, unless nobody does."""
    return {
        "address": address,
        "secret": secret,
        "command": program.command,
        "environment": dict(program.environment),
        "program_secret": program.secret,
        "handles_signals": program.handles_signals,
        "rank": rank,
        "is_ranked": is_ranked,
    }


def order_variable(
    address: str, secret: str, program: Program, rank: int | None, ranks: int = 1
) -> dict[str, str]:
    """The variable for an agent of so many ranks; `rank` as for `order_of`."""
    return {ORDER: json.dumps(order_of(address, secret, program, rank) | {"ranks": ranks})}


@dataclass(frozen=True, slots=True)
class LetGo:
    """What a launcher says when it lets an agent go."""

    error: str | None
    """Why the run has ended; None where it has ended well."""
    again: bool
    """Whether the ranks will be started once more."""


class Agent:
    """Serves one launcher until that lets it go, or is gone."""

    def __init__(self, order: Mapping[str, Any], ranks: int = 1) -> None:
        self._order = order
        self._launcher = LocalLauncher(dict(os.environ), self._said, holds=False)
        self._started: Sequence[LocalRank] = ()
        self._slots = ranks
        self._over = threading.Event()
        self._connection: Connection = connect(order["address"], order["secret"], _REACH_SECONDS)

    def run(self) -> LetGo | None:
        """Until the launcher lets this agent go; None where it is gone."""
        rank = self._order["rank"]
        if rank is None and self._order["is_ranked"]:
            rank = read_launcher(os.environ).rank
        self._connection.send(
            "here",
            rank=rank,
            slots=self._slots,
            host=socket.gethostname(),
            host_id=host_id(os.environ.get(HOST_VARIABLE, "")),
            pid=os.getpid(),
            space=process_space(),
            addresses=_free_addresses(self._connection.own_host, self._slots),
        )
        threading.Thread(target=self._beat, name="beats", daemon=True).start()
        try:
            return self._serve()
        finally:
            self._over.set()
            self._end()
            self._connection.send("gone")
            self._connection.close()

    def leave(self) -> None:
        """End everything; the engine wants this agent to go."""
        self._connection.close()

    def _serve(self) -> LetGo | None:
        while (message := self._connection.receive()) is not None:
            kind = message["kind"]
            if kind == "start":
                self._start(message["ranks"], message["variables"], str(message["world"]))
            elif kind == "signal":
                for each in self._started:
                    if each.rank in message["ranks"] and not each.ended.is_set():
                        each.send(int(message["number"]))
            elif kind == "end":
                return LetGo(message["error"], bool(message["again"]))
        return None

    def _start(
        self, ranks: Sequence[int], variables: Sequence[Mapping[str, str]], world: str
    ) -> None:
        order = self._order
        # Who hears the world's name on its way does not know its token.
        secret = str(order["secret"]).encode()
        token = hmac.digest(secret, b"world:" + world.encode(), "sha256").hex()
        variables = [{**each, TOKEN: token} for each in variables]
        program = Program(
            tuple(order["command"]),
            order["environment"],
            order["program_secret"],
            order["handles_signals"],
        )
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
        self._send_line("output", rank, line)

    def _error(self, rank: int, line: str) -> None:
        self._send_line("error", rank, line)

    def _send_line(self, kind: str, rank: int, line: str) -> None:
        for begin in range(0, len(line), LINE_CHARACTERS):
            self._connection.send(kind, rank=rank, line=line[begin : begin + LINE_CHARACTERS])

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
    order = json.loads(os.environ.pop(ORDER))
    try:
        agent = Agent(order, order["ranks"])
    except PlanCompilerError as error:
        sys.stderr.write(f"plancompiler: the agent of a rank: {error}\n")
        return 1
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: agent.leave())
    # The launcher sends it to those that are meant; engines send it to everything of theirs.
    signal.signal(signal.SIGUSR1, lambda *_: None)
    if "--with-stdin" in sys.argv:
        _leave_with_stdin(agent)
    agent.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
