"""Clients that mean harm, or are broken: the master serves the others and gives back what it took.

Each case attacks one master in one way, at random sizes. While the attack lasts a status must come
in time; after it a job must run, and memory and descriptors must be as before.
"""

from __future__ import annotations

import contextlib
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import zstandard

from benchmarks.campaign.case import Case, Result, unforeseen_lines
from benchmarks.campaign.sandbox import PROGRAMS, Child, Sandbox, until
from plancompiler.cluster.channel import SESSION_KEY, connect_master
from plancompiler.cluster.checked import Sent
from plancompiler.proto import cluster_pb2 as pb
from plancompiler.running.watched_job import job_request
from plancompiler.version import VERSION

COUNT = 70
ATTACKS = (
    "random bytes",
    "silent connections",
    "half a greeting",
    "garbage after the greeting",
    "calls without a secret",
    "calls with a wrong secret",
    "messages that are too large",
    "submissions that unpack to much",
    "submissions that lie about their size",
    "streams that say nothing",
    "watchers of one job",
    "a worker that is none",
    "connections in a hurry",
)
RANKS = 2
JOB = PROGRAMS / "regression.py"
START_SECONDS = 60.0
STATUS_SECONDS = 10.0
SETTLE_SECONDS = 45.0
"""Within which descriptors go back: silent streams and connections end after 30 s."""
MIB = 1 << 20
GROWTH_BYTES = 96 * MIB
"""That a master may have taken more than before, at most, while attacked and afterwards."""
DESCRIPTORS = 16
"""That may still be open more than before the attack."""
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SERVICE = "/plancompiler.proto.Client/"
WORKERS = "/plancompiler.proto.Worker/"


@cache
def _bomb() -> bytes:
    """Little that unpacks to much."""
    return zstandard.ZstdCompressor(level=19).compress(bytes(256 * MIB))


def as_bytes(message: bytes) -> bytes:
    """How requests and answers are written and read: not at all."""
    return message


class Hostile:
    """Runs cases against one master and its two workers."""

    def __init__(self) -> None:
        self.sandbox = Sandbox()
        self.master: Child | None = None
        self.address = ("", 0)
        self._open: list[socket.socket] = []
        self._channels: list[grpc.Channel] = []
        self._calls: list[Any] = []
        self._token = ("--token-file", self.sandbox.token_file)

    def _start(self) -> Child:
        if self.master is None or self.master.code is not None:
            self.sandbox.clear()
            words: tuple[object, ...]
            words = ("master", "--listen", "127.0.0.1:0", "--ranks", RANKS, "--json", *self._token)
            self.master = self.sandbox.program("the master", *words)
            if not self.master.says('"address"', START_SECONDS):
                raise RuntimeError(f"no master starts: {self.master.err}")
            host, _, port = re.findall(r'"address": "([^"]+)"', self.master.out)[0].rpartition(":")
            self.address = (host, int(port))
            for rank in range(RANKS):
                words = ("worker", "--master", f"{host}:{port}", "--rank", rank, *self._token)
                self.sandbox.program(f"worker {rank}", *words)
            self._submit()  # from now on memory is that of a master that has run a job
        return self.master

    def _submit(self) -> Child:
        host, port = self.address
        words = ("submit", JOB, "--master", f"{host}:{port}", "--steps", 5, "--json")
        child = self.sandbox.program("a client", *words, *self._token)
        child.wait(START_SECONDS)
        return child

    def run(self, case: Case) -> Result:
        """One attack."""
        attack = ATTACKS[case.index % len(ATTACKS)]
        choices = case.choices
        master = self._start()
        result = Result(case, attack, attack, ending="others are served, all is given back")
        memory, descriptors = size_of(master.pid), descriptors_of(master.pid)
        peak = Peak(master.pid)
        try:
            result.what = f"{attack}: {self._attack(attack, choices)}"
            begin = time.monotonic()
            asked = self.sandbox.start(
                "a status",
                PROGRAMS / "ask_status.py",
                "{}:{}".format(*self.address),
                self.sandbox.token_file,
            )
            code = asked.wait(STATUS_SECONDS + START_SECONDS)
            result.require(code == 0, f"no status while attacked: {asked.err}")
            seconds = re.search(r"seconds (\S+)", asked.out)
            result.seconds = float(seconds[1]) if seconds else time.monotonic() - begin
            result.require(result.seconds < STATUS_SECONDS, f"a status took {result.seconds:.1f} s")
        finally:
            self._stop_attack()
            grown = peak.stop() - memory
        after = self._submit()
        result.require(after.code == 0, f"the next job ended with {after.code}: {after.last_line}")
        result.require(master.code is None, f"the master ended: {master.last_line}")
        result.require(grown < GROWTH_BYTES, f"its memory grew by {grown // MIB} MiB")
        until(lambda: descriptors_of(master.pid) <= descriptors + DESCRIPTORS, SETTLE_SECONDS)
        more = descriptors_of(master.pid) - descriptors
        result.require(more <= DESCRIPTORS, f"{more} descriptors more than before stay open")
        result.problems += [f"the master says: {line}" for line in unforeseen_lines(master.err)]
        if result.problems:
            self.sandbox.clear()
            self.master = None
        return result

    # --- attacks -------------------------------------------------------------------------------

    def _attack(self, attack: str, choices: random.Random) -> str:
        """Begin; what was done, in words. Most stays open until `_stop_attack`."""
        count = choices.randint(20, 120)
        match attack:
            case "random bytes":
                for _ in range(count):
                    self._send(choices.randbytes(choices.randint(1, 4000)))
            case "silent connections":
                for _ in range(count):
                    self._send(b"")
            case "half a greeting":
                for _ in range(count):
                    self._send(GREETING[: choices.randrange(len(GREETING))])
            case "garbage after the greeting":
                for _ in range(count):
                    self._send(GREETING + _frames(choices))
            case "calls without a secret" | "calls with a wrong secret":
                session = ((SESSION_KEY, choices.randbytes(choices.randint(0, 200))),)
                self._wrong_calls(count, session if "wrong" in attack else ())
            case "messages that are too large":
                count = choices.randint(2, 6)
                self._requests(
                    "Cancel", count, lambda: choices.randbytes(choices.randint(5, 9) * MIB)
                )
            case "submissions that unpack to much":
                count = choices.randint(4, 16)
                data = _bomb()
                chunk = pb.Chunk(
                    data=data,
                    wire_bytes=len(data),
                    raw_bytes=256 * MIB,
                    compression=pb.COMPRESSION_ZSTD,
                )
                self._submissions(count, [pb.SubmitRequest(chunk=chunk)], True)
            case "submissions that lie about their size":
                sizes = (1 << 62, 1 << 40, 512 * MIB, 256 * MIB)
                for _ in range(count):
                    size = choices.choice(sizes)
                    chunk = pb.Chunk(data=b"abc", wire_bytes=size, raw_bytes=size)
                    self._submissions(1, [pb.SubmitRequest(chunk=chunk)], choices.random() < 0.5)
            case "streams that say nothing":
                self._submissions(count, [], False)
            case "watchers of one job":
                watch = self._channel().unary_stream(SERVICE + "Watch", as_bytes, as_bytes)
                request = job_request(choices.randint(1, 3)).SerializeToString()
                self._calls += [watch(request) for _ in range(10 * count)]
            case "a worker that is none":
                for _ in range(count):
                    connect = self._channel().stream_stream(WORKERS + "Connect", as_bytes, as_bytes)
                    first = choices.randbytes(choices.randint(0, 200))
                    self._calls.append(connect(_then_wait([first])))
            case "connections in a hurry":
                count *= 10
                for _ in range(count):
                    with contextlib.suppress(OSError), socket.create_connection(self.address):
                        pass
        return f"{count} times"

    def _send(self, data: bytes) -> None:
        """A connection that says this, and stays."""
        with contextlib.suppress(OSError):
            made = socket.create_connection(self.address, timeout=5.0)
            self._open.append(made)
            made.sendall(data)

    def _channel(self) -> grpc.Channel:
        """A connection of its own, of somebody who knows the token."""
        address = "{}:{}".format(*self.address)
        channel = connect_master(address, None, self.sandbox.token_file, START_SECONDS)
        self._channels.append(channel)
        return channel

    def _wrong_calls(self, count: int, metadata: tuple[tuple[str, bytes], ...]) -> None:
        channel = grpc.insecure_channel("{}:{}".format(*self.address))
        self._channels.append(channel)
        for number in range(count):
            method = ("Status", "Cancel", "Finish")[number % 3]
            call = channel.unary_unary(SERVICE + method, as_bytes, as_bytes)
            self._calls.append(call.future(b"", timeout=10.0, metadata=metadata))

    def _requests(self, method: str, count: int, make: Callable[[], bytes]) -> None:
        channel = self._channel()
        call = channel.unary_unary(SERVICE + method, as_bytes, as_bytes)
        for _ in range(count):
            self._calls.append(call.future(make(), timeout=20.0))

    def _submissions(self, count: int, messages: list[pb.SubmitRequest], ends: bool) -> None:
        header = pb.SubmitRequest(header=pb.SubmitHeader(version=VERSION, steps=1))
        sent = Sent()
        data = [sent(each).SerializeToString() for each in (header, *messages)]
        call = self._channel().stream_unary(SERVICE + "Submit", as_bytes, as_bytes)
        for _ in range(count):
            given = iter(data) if ends else _then_wait(data)
            self._calls.append(call.future(given, timeout=60.0))

    def _stop_attack(self) -> None:
        for call in self._calls:
            call.cancel()
        for channel in self._channels:
            channel.close()
        for each in self._open:
            each.close()
        self._calls.clear()
        self._channels.clear()
        self._open.clear()

    def close(self) -> None:
        """End everything."""
        self._stop_attack()
        self.sandbox.__exit__(None, None, None)


class Peak:
    """The largest size of a process while it is watched."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._largest = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stopped.wait(0.02):
            self._largest = max(self._largest, size_of(self._pid))

    def stop(self) -> int:
        """The largest size."""
        self._stopped.set()
        self._thread.join()
        return max(self._largest, size_of(self._pid))


def _then_wait(messages: list[bytes]) -> Iterator[bytes]:
    """Messages, and then none for as long as somebody waits."""
    yield from messages
    threading.Event().wait(90.0)


def _frames(choices: random.Random) -> bytes:
    """Frames of HTTP/2 with random types, flags, streams, and contents."""
    frames = b""
    for _ in range(choices.randint(1, 20)):
        content = choices.randbytes(choices.randint(0, 300))
        length = len(content) if choices.random() < 0.8 else choices.getrandbits(24)
        head = length.to_bytes(3, "big") + bytes([choices.randrange(12), choices.randrange(256)])
        frames += head + choices.getrandbits(31).to_bytes(4, "big") + content
    return frames


def size_of(pid: int) -> int:
    """Resident bytes of a process."""
    with contextlib.suppress(OSError, IndexError):
        status = Path(f"/proc/{pid}/status").read_text()
        return 1024 * int(status.split("VmRSS:")[1].split()[0])
    return 0


def descriptors_of(pid: int) -> int:
    """Open descriptors of a process."""
    with contextlib.suppress(OSError):
        return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    return 0


@contextlib.contextmanager
def opened() -> Iterator[Hostile]:
    """Runs cases."""
    hostile = Hostile()
    try:
        yield hostile
    finally:
        hostile.close()
