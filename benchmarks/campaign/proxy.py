"""A TCP proxy on the loopback address that does one thing wrong, once, at a chosen byte."""

from __future__ import annotations

import contextlib
import math
import random
import socket
import struct
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self

FAULTS = (
    "delay",
    "pause",
    "reset",
    "truncate",
    "cut",
    "flip",
    "duplicate",
    "blackhole",
    "half-close",
)
DELAY_SECONDS = 0.15
"""The most that one piece is delayed, for as long as a delay lasts."""
DELAYED_SECONDS = 3.0
PAUSE_SECONDS = (1.0, 3.0)
PIECE = 65536


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to the piece with the `after`-th byte of a direction, counted over all
    connections from when the proxy is armed."""

    kind: str
    to_server: bool
    after: int

    def __str__(self) -> str:
        way = "to the server" if self.to_server else "from the server"
        return f"{self.kind} after {self.after} bytes {way}"


def random_fault(choices: random.Random, to_server: int, from_server: int) -> Fault:
    """Any fault within so many bytes of a direction: half of them early, half anywhere."""
    is_to_server = choices.random() < 0.5
    end = to_server if is_to_server else from_server
    early = int(10 ** choices.uniform(1.0, math.log10(end)))
    after = early if choices.random() < 0.5 else choices.randrange(end)
    return Fault(choices.choice(FAULTS), is_to_server, after)


class Proxy:
    """Passes connections on to a server; see `arm`."""

    def __init__(self, server: str, choices: random.Random) -> None:
        host, _, port = server.rpartition(":")
        self._server = (host, int(port))
        self.server = server
        self._choices = choices
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._fault: Fault | None = None
        self._passed = 0
        self.fired_at: float | None = None
        """When the fault began."""
        self.connections = 0
        """That have come to it."""
        self._swallows = False
        self._delays_until = 0.0
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def arm(self, fault: Fault) -> None:
        """Do it, once, when its byte comes."""
        with self._lock:
            self._passed = 0
            self._fault = fault

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._sockets.append(client)
            if self._swallows:
                continue
            try:
                server = socket.create_connection(self._server, timeout=5.0)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            self._sockets.append(server)
            for ends in ((client, server, True), (server, client, False)):
                thread = threading.Thread(target=self._pass_on, args=ends, daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pass_on(self, source: socket.socket, target: socket.socket, to_server: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(PIECE):
                fault, at = self._due(len(data), to_server)
                if self._swallows:
                    continue
                if time.monotonic() < self._delays_until:
                    # The fault itself: a network that delays what it carries.
                    time.sleep(self._choices.uniform(0.0, DELAY_SECONDS))
                if fault is None:
                    target.sendall(data)
                elif not self._go_wrong(fault, data, at, source, target):
                    return
        if self._swallows:
            return
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _due(self, count: int, to_server: bool) -> tuple[Fault | None, int]:
        """The fault, if this piece has its byte, and where in the piece that is."""
        with self._lock:
            fault = self._fault
            if fault is None or fault.to_server != to_server:
                return None, 0
            before, self._passed = self._passed, self._passed + count
            if self._passed <= fault.after:
                return None, 0
            self._fault = None
            self.fired_at = time.monotonic()
            return fault, fault.after - before

    def _go_wrong(
        self, fault: Fault, data: bytes, at: int, source: socket.socket, target: socket.socket
    ) -> bool:
        """Do it; whether the direction goes on."""
        match fault.kind:
            case "delay":
                self._delays_until = time.monotonic() + DELAYED_SECONDS
                target.sendall(data)
            case "pause":
                time.sleep(self._choices.uniform(*PAUSE_SECONDS))  # the fault itself
                target.sendall(data)
            case "reset":
                _reset(source, target)
                return False
            case "truncate":
                target.sendall(data[:at])
                _reset(source, target)
                return False
            case "cut":
                target.sendall(data[:at] + data[at + self._choices.randint(1, 16) :])
            case "flip":
                changed = bytearray(data)
                changed[at] ^= 1 << self._choices.randrange(8)
                target.sendall(changed)
            case "duplicate":
                length = self._choices.randint(1, 4096)
                target.sendall(data[:at] + 2 * data[at : at + length] + data[at + length :])
            case "blackhole":
                self._swallows = True
            case "half-close":
                target.sendall(data[:at])
                target.shutdown(socket.SHUT_WR)
                while source.recv(PIECE):
                    pass
                return False
        return True

    def close(self) -> None:
        """End all connections and wait for the threads."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join(5.0)
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5.0)
        for each in self._sockets:
            each.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _reset(*sockets: socket.socket) -> None:
    """Close with RST: no last words."""
    for each in sockets:
        with contextlib.suppress(OSError):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            # A thread that still reads would keep the connection open.
            each.shutdown(socket.SHUT_RD)
            each.close()
