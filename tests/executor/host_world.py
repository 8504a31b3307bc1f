"""Ranks as real processes of one or several hosts, driven by the test over pipes.

Ranks of one host share memory; which ranks those are the test decides.
"""

from __future__ import annotations

import gc
import multiprocessing
import secrets
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from plancompiler.errors import PlanCompilerError
from plancompiler.executor.comm.choice import open_link
from plancompiler.executor.comm.link import Link
from plancompiler.executor.comm.remote import PeerServer, remote_link
from plancompiler.executor.runtime import Runtime
from plancompiler.ops import registry
from plancompiler.plan.plan import Plan
from tests.executor.kernels import TEST_OPS

ANSWER_SECONDS = 120
"""How long a test waits for a rank before it gives up."""

Build = Callable[..., Mapping[int, Plan]]


def own_threads() -> list[str]:
    """Names of this process's threads that the executor started."""
    return [one.name for one in threading.enumerate() if one.name.startswith("plancompiler")]


def shared_mappings() -> list[str]:
    """Mappings and open descriptors of this process that are executor memory."""
    mappings = _shared_mappings()
    if mappings:  # circles of arrays may hold some until they are collected, which takes long
        gc.collect()
        mappings = _shared_mappings()
    return mappings


def _shared_mappings() -> list[str]:
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd" in line]
    links = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            links.append(str(descriptor.readlink()))
        except FileNotFoundError:
            continue
    return [text for text in (*maps, *links) if "plancompiler" in text]


def make_link(
    token: str, rank: int, hosts: Sequence[int], server: PeerServer | None, ports: Mapping[int, int]
) -> Link:
    """The link of a rank; `hosts` by rank, empty where all are of one host."""
    if server is None:
        return open_link(token, rank, 0)
    far = [other for other, host in enumerate(hosts) if host != hosts[rank]]
    addresses = {other: f"127.0.0.1:{ports[other]}" for other in far}
    remote = partial(remote_link, rank=rank, server=server, addresses=addresses)
    return open_link(token, rank, len(hosts), far=far, remote=remote)


def _serve(connection: Connection, rank: int) -> None:
    """A rank's process: does what it is told until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    registry._TABLE.update(TEST_OPS)
    runtime: Runtime | None = None
    server: PeerServer | None = None
    outputs: dict[int, dict[str, np.ndarray]] = {}

    def collect(step: int, name: str, value: np.ndarray) -> None:
        outputs.setdefault(step, {})[name] = value

    while True:
        try:
            command, arguments = connection.recv()
        except EOFError:
            break
        answer: Any = None
        try:
            if command == "open":
                token, build, build_arguments, hosts, ports, options = arguments
                plan = build(*build_arguments)[rank]
                if runtime is not None:
                    runtime.close()
                runtime = Runtime(
                    plan,
                    make_link(token, rank, hosts, server, ports),
                    on_outputs=collect,
                    **options,
                )
                runtime.prepare()
            elif command == "listen":
                server = server or PeerServer("127.0.0.1:0")
                answer = server.port
            elif command == "deafen" and server is not None:
                server.close()
                server = None
            elif command == "close" and runtime is not None:
                runtime.close()
                runtime = None
            elif command == "step" and runtime is not None:
                for feeds in arguments:
                    runtime.feed({name: feeds[name] for name in runtime.input_names})
                outputs.clear()
                runtime.run(len(arguments))
                answer = dict(outputs)
            elif command == "variables" and runtime is not None:
                answer = runtime.variables()
            elif command == "leaks":
                answer = own_threads(), shared_mappings()
            connection.send(("ok", answer))
        except PlanCompilerError as error:
            connection.send(("error", error.report))
    if runtime is not None:
        runtime.close()
    if server is not None:
        server.close()


class HostWorld:
    """Processes for `size` ranks; they can run one set of plans after another."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connections: list[Connection] = []
        self.processes = []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, rank), daemon=True)
            process.start()
            there.close()
            self.connections.append(here)
            self.processes.append(process)

    def open(
        self,
        build: Build,
        *arguments: object,
        ranks: Sequence[int],
        hosts: Sequence[int] = (),
        **options: object,
    ) -> None:
        """Prepare the plans that `build(*arguments)` makes, on these ranks.

        `hosts` are numbers of hosts by rank; without them all ranks are of one host.
        """
        token = secrets.token_hex(16)
        ports = {rank: self.ask(rank, "listen") for rank in ranks} if hosts else {}
        for rank in ranks:
            self.tell(rank, "open", (token, build, arguments, hosts, ports, options))
        self.collect(ranks)

    def step(
        self, feeds: Sequence[Mapping[str, object]], ranks: Sequence[int]
    ) -> list[dict[str, np.ndarray]]:
        """Run steps on these ranks; outputs of each step, of all ranks together."""
        for rank in ranks:
            self.tell(rank, "step", list(feeds))
        merged: dict[int, dict[str, np.ndarray]] = {}
        for by_step in self.collect(ranks):
            for step, named in by_step.items():
                merged.setdefault(step, {}).update(named)
        return [merged[step] for step in sorted(merged)]

    def close_run(self, ranks: Sequence[int]) -> None:
        """Close the runtimes on these ranks, in turn."""
        for rank in ranks:
            self.ask(rank, "close")
            self.ask(rank, "deafen")

    def tell(self, rank: int, command: str, arguments: object = None) -> None:
        """Send a command without waiting."""
        self.connections[rank].send((command, arguments))

    def answer(self, rank: int) -> Any:
        """A rank's answer; raises the error it met."""
        if not self.connections[rank].poll(ANSWER_SECONDS):
            raise TimeoutError(f"rank {rank} does not answer")
        kind, value = self.connections[rank].recv()
        if kind == "error":
            raise PlanCompilerError.from_report(value)
        return value

    def ask(self, rank: int, command: str, arguments: object = None) -> Any:
        """Send a command and wait for the answer."""
        self.tell(rank, command, arguments)
        return self.answer(rank)

    def collect(self, ranks: Sequence[int]) -> list[Any]:
        """Answers of all these ranks; raises the first error after all have answered."""
        collected, errors = [], []
        for rank in ranks:
            try:
                collected.append(self.answer(rank))
            except PlanCompilerError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return collected

    def kill(self, rank: int) -> None:
        """SIGKILL one rank's process and wait for its end."""
        self.processes[rank].kill()
        self.processes[rank].join()

    def shut_down(self) -> None:
        """End all processes."""
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.join(ANSWER_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
