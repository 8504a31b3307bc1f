"""A master with a journal that is killed at a random moment, and started again.

A client follows a job over all ranks, a second job waits behind it. Whatever the master did when it
was killed, the workers come back, both jobs end with the numbers of a quiet run, each step once,
and the clients go on reading as if nothing had happened.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator

from benchmarks.campaign.case import Case, Result, unforeseen_lines
from benchmarks.campaign.network import START_SECONDS, free_port, losses_of
from benchmarks.campaign.sandbox import PROGRAMS, Child, Sandbox, until

COUNT = 100
RANKS = 2
STEPS = 300
JOB = PROGRAMS / "regression.py"
LIMIT_SECONDS = 60.0
"""For both jobs together after the last kill; far more than they need."""
MOMENTS = ("queued after", "compiling after", "checking after", "preparing after", "running after")
"""The words of the first client after which the master is killed, a random time later."""
LONGEST_WAIT = 0.6
"""Seconds between these words and the kill: steps last about as long."""
MOST_KILLS = 3


class Restarts:
    """Runs cases; keeps its master and its workers while they serve."""

    def __init__(self) -> None:
        self.sandbox = Sandbox()
        self.address = f"127.0.0.1:{free_port()}"
        self.master: Child | None = None
        self.workers: list[Child] = []
        self.reference: list[float] = []
        self._token = ("--token-file", self.sandbox.token_file)

    def _start_master(self) -> Child:
        journal = self.sandbox.token_file.parent / "journal"
        words = ("master", "--listen", self.address, "--ranks", RANKS, "--json", *self._token)
        self.master = self.sandbox.program("the master", *words, "--journal", journal)
        if not self.master.says('"address"', START_SECONDS):
            raise RuntimeError(f"no master starts: {self.master.err}")
        return self.master

    def _start(self) -> None:
        if self.master is None:
            self._start_master()
            self.workers = [
                self.sandbox.program(
                    f"worker {rank}", "worker", "--master", self.address, *self._token
                )
                for rank in range(RANKS)
            ]
            quiet = self._submit("a quiet client")
            if quiet.wait(START_SECONDS) != 0:
                raise RuntimeError(f"a run that nobody disturbs fails: {quiet.err}")
            self.reference = losses_of(quiet)

    def _submit(self, name: str) -> Child:
        words = ("submit", JOB, "--master", self.address, "--steps", STEPS, "--json")
        return self.sandbox.program(name, *words, *self._token)

    def run(self, case: Case) -> Result:
        """One case."""
        choices = case.choices
        moment = MOMENTS[case.index % len(MOMENTS)]
        waits = [choices.uniform(0, LONGEST_WAIT) for _ in range(choices.randint(1, MOST_KILLS))]
        what = f"killed {len(waits)} times, first {waits[0]:.2f} s after {moment!r}"
        result = Result(case, f"master killed while {moment.split()[0]}", what)
        self._start()
        clients = [self._submit("the first client")]
        clients[0].says(moment, START_SECONDS)
        clients.append(self._submit("the second client"))
        for wait in waits:
            time.sleep(wait)  # the case: a kill at any time, whatever goes on just then
            assert self.master is not None
            self.master.send(signal.SIGKILL)
            self.master.wait(START_SECONDS)
            self._start_master()
        began = time.monotonic()
        until(lambda: all(each.code is not None for each in clients), LIMIT_SECONDS)
        result.seconds = time.monotonic() - began
        for client in clients:
            self._judge(result, client)
        for child in (self.master, *self.workers):
            assert child is not None
            result.require(child.code is None, f"{child.name} ended: {child.last_line}")
            result.problems += [f"{child.name}: {line}" for line in unforeseen_lines(child.err)]
        if result.problems:
            self.sandbox.clear()
            self.master = None
        return result

    def _judge(self, result: Result, client: Child) -> None:
        client.wait(0.0)
        lost = "no master can be reached"
        if client.code is None:
            result.problems.append(f"{client.name} still runs; it said last: {client.last_line}")
        elif client.code != 0 and not client.says("queued after", 0.0) and lost in client.err:
            # It had not yet reached the master for the first time.
            result.ending = "an error names the master, which was away at the client's start"
        else:
            result.require(client.code == 0, f"{client.name} fails: {client.last_line}")
            given = losses_of(client)
            result.require(given == self.reference, f"{client.name} has {len(given)} steps")
            result.ending = result.ending or "right numbers"
        result.problems += [f"{client.name}: {line}" for line in unforeseen_lines(client.err)]

    def close(self) -> None:
        """End everything."""
        self.sandbox.__exit__(None, None, None)


@contextlib.contextmanager
def opened() -> Iterator[Restarts]:
    """Runs cases."""
    restarts = Restarts()
    try:
        yield restarts
    finally:
        restarts.close()
