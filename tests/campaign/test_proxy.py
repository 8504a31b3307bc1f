"""The proxy of the campaign does to a connection what it says, and nothing else."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Iterator

import pytest

from benchmarks.campaign.proxy import FAULTS, Fault, Proxy, random_fault
from benchmarks.campaign.sandbox import until

SENT = bytes(range(200)) * 5
WAIT = 20.0


class Echo:
    """A server that keeps what comes over its first connection."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.came = b""
        self.ended = threading.Event()
        self._listener.settimeout(WAIT)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(WAIT)
        try:
            while data := connection.recv(4096):
                self.came += data
        except OSError:
            pass
        self.ended.set()
        connection.close()

    def close(self) -> None:
        self._listener.close()
        self._thread.join(WAIT)
        assert not self._thread.is_alive()


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.close()


def through(echo: Echo, kind: str, after: int) -> bytes:
    """What arrives of `SENT` beyond a proxy with a fault."""
    with Proxy(echo.address, random.Random(1)) as proxy:
        proxy.arm(Fault(kind, True, after))
        host, _, port = proxy.address.rpartition(":")
        with socket.create_connection((host, int(port))) as client:
            client.sendall(SENT)
            with contextlib.suppress(OSError):  # a reset may have ended it by now
                client.shutdown(socket.SHUT_WR)
            assert until(lambda: proxy.fired_at, WAIT)
            if kind != "blackhole":
                assert echo.ended.wait(WAIT)
    assert echo.ended.wait(WAIT)
    return echo.came


def test_what_is_only_late_arrives(echo: Echo) -> None:
    assert through(echo, "delay", 30) == SENT


@pytest.mark.parametrize("kind", ["truncate", "half-close"])
def test_what_ends_early_is_a_beginning(echo: Echo, kind: str) -> None:
    assert through(echo, kind, 300) == SENT[:300]


@pytest.mark.parametrize("kind", ["reset", "blackhole"])
def test_what_is_lost_is_lost(echo: Echo, kind: str) -> None:
    assert through(echo, kind, 0) == b""


def test_one_bit_is_flipped(echo: Echo) -> None:
    came = through(echo, "flip", 300)
    assert len(came) == len(SENT)
    wrong = [at for at, (a, b) in enumerate(zip(came, SENT, strict=True)) if a != b]
    assert wrong == [300]
    assert (came[300] ^ SENT[300]).bit_count() == 1


def test_bytes_are_cut_out_and_repeated(echo: Echo) -> None:
    came = through(echo, "cut", 300)
    assert len(SENT) - 16 <= len(came) < len(SENT)
    assert came[:300] == SENT[:300]
    assert SENT.endswith(came[300:])


def test_bytes_are_repeated(echo: Echo) -> None:
    came = through(echo, "duplicate", 300)
    assert came[:300] == SENT[:300]
    length = len(came) - len(SENT)
    assert length > 0
    assert came[300 : 300 + length] == came[300 + length : 300 + 2 * length]


def test_every_fault_is_drawn() -> None:
    choices = random.Random(1)
    drawn = [random_fault(choices, 1000, 100) for _ in range(500)]
    assert {fault.kind for fault in drawn} == set(FAULTS)
    assert all(fault.after < (1000 if fault.to_server else 100) for fault in drawn)
