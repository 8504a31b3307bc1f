"""Connections that go wrong: between client and master, worker and master, workers, eager ranks.

A proxy delays, pauses, resets, truncates, cuts, flips, duplicates, swallows or half-closes what it
passes on, once, at a random byte. The run gives the right numbers, or an error in time.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterator

from benchmarks.campaign.case import Case, Result, unforeseen_lines
from benchmarks.campaign.proxy import Fault, Proxy, random_fault
from benchmarks.campaign.sandbox import PROGRAMS, Child, Sandbox, until
from plancompiler.limits import time_limits

COUNT = 200
PLACES = {
    "client and master": (2_600, 7_000),
    "worker and master": (7_000, 3_000),
    "workers": (16_000, 250),
    "eager ranks": (24_000, 280),
}
"""Between whom, and how many bytes a run that nobody disturbs sends to the server and from it."""
RANKS = 2
STEPS = 60
JOB = PROGRAMS / "regression.py"
START_SECONDS = 60.0
LIMIT_SECONDS = 15.0
"""Within which a connection that no longer carries anything is noticed, or a wrong one."""
CONNECTING_SECONDS = time_limits.PREPARING
"""The same between workers, which may still be connecting to each other."""
SLACK_SECONDS = 10.0
ERROR = re.compile(r"\[(E\d{3}) (\w+)\]")


def free_port() -> int:
    """A port that was free just now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


class Network:
    """Runs cases; keeps its master while it serves."""

    def __init__(self) -> None:
        self.sandbox = Sandbox()
        self.master: Child | None = None
        self.address = ""
        self.workers: dict[tuple[str, int], Child] = {}
        self.references: dict[str, list[float]] = {}
        self._token = ("--token-file", self.sandbox.token_file)

    # --- what a case needs ---------------------------------------------------------------------

    def _start_master(self) -> None:
        if self.master is None or self.master.code is not None:
            words = ("master", "--listen", "127.0.0.1:0", "--ranks", RANKS, "--json", *self._token)
            self.master = self.sandbox.program("the master", *words)
            if not self.master.says('"address"', START_SECONDS):
                raise RuntimeError(f"no master starts: {self.master.err}")
            self.address = re.findall(r'"address": "([^"]+)"', self.master.out)[0]

    def _start_workers(self, far: bool) -> None:
        """A worker per rank, of one host or of two."""
        for (kind, rank), worker in list(self.workers.items()):
            if (kind == "far") != far or worker.code is not None:
                worker.end()
                del self.workers[kind, rank]
        for rank in range(RANKS):
            if ("far" if far else "near", rank) not in self.workers:
                self._start_worker(rank, self.address, far)

    def _start_worker(self, rank: int, master: str, far: bool, proxy: Proxy | None = None) -> None:
        words: tuple[object, ...] = ("worker", "--master", master, "--rank", rank, *self._token)
        environment = {"PLANCOMPILER_HOST": f"host{rank}"} if far else {}
        name = f"worker {rank}"
        if proxy is None:
            child = self.sandbox.program(name, *words, **environment)
        else:
            program = (PROGRAMS / "behind_proxy.py", proxy.address, *words)
            child = self.sandbox.start(name, *program, "--listen", proxy.server, **environment)
        self.workers["far" if far else "near", rank] = child

    def _submit(self, master: str) -> Child:
        words = ("submit", JOB, "--master", master, "--steps", STEPS, "--json", *self._token)
        return self.sandbox.program("the client", *words)

    # --- cases ---------------------------------------------------------------------------------

    def run(self, case: Case) -> Result:
        """One case."""
        place = tuple(PLACES)[case.index % len(PLACES)]
        choices = case.choices
        fault = random_fault(choices, *PLACES[place])
        result = Result(case, f"{place}: {fault.kind}", f"between {place}: {fault}")
        {
            "client and master": self._client,
            "worker and master": self._worker,
            "workers": self._workers,
            "eager ranks": self._eager,
        }[place](result, fault, choices)
        if result.problems:
            self.sandbox.clear()
            self.master = None
            self.workers.clear()
        return result

    def _client(self, result: Result, fault: Fault, choices: random.Random) -> None:
        self._start_master()
        self._start_workers(far=False)
        self._refer("cluster", lambda: self._submit(self.address))
        with Proxy(self.address, choices) as proxy:
            proxy.arm(fault)
            client = self._submit(proxy.address)
            self._judge(result, "cluster", proxy, [client])
        assert self.master is not None
        for child in (self.master, *self.workers.values()):
            result.require(child.code is None, f"{child.name} ended: {child.last_line}")

    def _worker(self, result: Result, fault: Fault, choices: random.Random) -> None:
        rank = choices.randrange(RANKS)
        self._start_master()
        self._start_workers(far=False)
        self._refer("cluster", lambda: self._submit(self.address))
        self.workers.pop(("near", rank)).end()
        with Proxy(self.address, choices) as proxy:
            if fault.after < 300:  # while it registers
                proxy.arm(fault)
            self._start_worker(rank, proxy.address, far=False)
            client = self._submit(self.address)
            if fault.after >= 300:
                client.says("compiling after", START_SECONDS)
                proxy.arm(fault)
            worker = self.workers["near", rank]
            self._replace_unless_registered(result, worker, client, rank)
            self._judge(result, "cluster", proxy, [client, worker])
            worker.end()
        self._look_at_others(result, worker)

    def _replace_unless_registered(
        self, result: Result, worker: Child, client: Child, rank: int
    ) -> None:
        """Where a worker cannot register it says why and ends; then another one comes."""
        begun = "compiling after"
        limit = LIMIT_SECONDS + SLACK_SECONDS
        until(lambda: worker.code is not None or begun in client.err, limit)
        if begun in client.err:
            return
        result.require(worker.code == 1, f"{worker.name} neither registers nor ends by an error")
        result.require(ERROR.search(worker.last_line), f"no named error: {worker.err}")
        self._start_worker(rank, self.address, far=False)

    def _workers(self, result: Result, fault: Fault, choices: random.Random) -> None:
        rank = choices.randrange(RANKS)
        self._start_master()
        self._start_workers(far=True)
        self._refer("hosts", lambda: self._submit(self.address))
        self.workers.pop(("far", rank)).end()
        with Proxy(f"127.0.0.1:{free_port()}", choices) as proxy:
            proxy.arm(fault)
            self._start_worker(rank, self.address, far=True, proxy=proxy)
            client = self._submit(self.address)
            worker = self.workers["far", rank]
            self._judge(result, "hosts", proxy, [client])
            worker.end()
        self._look_at_others(result, worker)

    def _look_at_others(self, result: Result, worker: Child) -> None:
        """The master serves on; a worker ended well or by an error of ours."""
        assert self.master is not None
        result.require(
            self.master.code is None, f"{self.master.name} ended: {self.master.last_line}"
        )
        for line in unforeseen_lines(worker.err):
            result.problems.append(f"{worker.name} says: {line}")

    def _eager(self, result: Result, fault: Fault, choices: random.Random) -> None:
        self._refer("eager", lambda: self._eager_ranks(None)[0])
        port = free_port()
        with Proxy(f"127.0.0.1:{port}", choices) as proxy:
            proxy.arm(fault)
            ranks = self._eager_ranks(proxy)
            self._judge(result, "eager", proxy, ranks)
            for child in ranks:
                child.end()

    def _eager_ranks(self, proxy: Proxy | None) -> list[Child]:
        """Rank 0 reaches rank 1 through the proxy."""
        own = [f"127.0.0.1:{free_port()}" for _ in range(RANKS)]
        if proxy is not None:
            own[1] = proxy.server
        seen = [own, own] if proxy is None else [[own[0], proxy.address], own]
        token = secrets.token_hex(16)
        return [
            self.sandbox.start(
                f"rank {rank}",
                PROGRAMS / "eager_losses.py",
                STEPS,
                PLANCOMPILER_RANK=str(rank),
                PLANCOMPILER_WORLD_SIZE=str(RANKS),
                PLANCOMPILER_WORLD_TRANSPORT="grpc",
                PLANCOMPILER_WORLD_TOKEN=token,
                PLANCOMPILER_WORLD_ADDRESSES=",".join(seen[rank]),
            )
            for rank in range(RANKS)
        ]

    # --- what must hold ------------------------------------------------------------------------

    def _refer(self, name: str, start: Callable[[], Child]) -> None:
        """The numbers of a run over connections that work."""
        if name not in self.references:
            child = start()
            if child.wait(START_SECONDS) != 0:
                raise RuntimeError(f"a run that nobody disturbs fails: {child.err}")
            self.references[name] = losses_of(child)

    def _judge(self, result: Result, name: str, proxy: Proxy, children: list[Child]) -> None:
        """The first child has the right numbers, or says an error; the others may go on."""
        first = children[0]

        def is_late() -> bool:
            begin = proxy.fired_at or max(child.began for child in children) + START_SECONDS
            limit = CONNECTING_SECONDS if result.group.startswith("workers:") else LIMIT_SECONDS
            return time.monotonic() > begin + limit + SLACK_SECONDS

        until(lambda: first.code is not None or is_late(), 3 * START_SECONDS)
        fired = "" if proxy.fired_at else " (never came)"
        result.what += fired
        if first.code is None:
            result.problems.append(f"{first.name} still runs; it said last: {first.last_line}")
            return
        first.wait(0.0)
        assert first.ended_at is not None
        if proxy.fired_at:
            result.seconds = max(0.0, first.ended_at - proxy.fired_at)
        for child in children:
            result.problems += [
                f"{child.name} says: {line}" for line in unforeseen_lines(child.err)
            ]
        if first.code == 0:
            given, expected = losses_of(first), self.references[name]
            result.ending = "right numbers"
            result.require(len(given) == len(expected), f"{len(given)} steps of {len(expected)}")
            wrong = [
                step for step, (a, b) in enumerate(zip(given, expected, strict=False)) if a != b
            ]
            result.require(not wrong, f"wrong numbers reported as success in steps {wrong}")
        else:
            error = ERROR.search(first.last_line)
            result.ending = error[2] if error else ""
            result.require(error, f"no named error (exit code {first.code}): {first.err}")
            result.require(proxy.fired_at, f"it fails without a fault: {first.last_line}")

    def close(self) -> None:
        """End everything."""
        self.sandbox.__exit__(None, None, None)


def losses_of(child: Child) -> list[float]:
    """The losses in the JSON line that a program printed."""
    for line in reversed(child.out.splitlines()):
        with contextlib.suppress(json.JSONDecodeError, KeyError, TypeError):
            return list(json.loads(line)["losses"])
    return []


@contextlib.contextmanager
def opened() -> Iterator[Network]:
    """Runs cases."""
    network = Network()
    try:
        yield network
    finally:
        network.close()
