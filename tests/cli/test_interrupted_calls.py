"""Ctrl-C while the main thread is in a call of gRPC."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from plancompiler.cli.interrupts import interrupt
from plancompiler.cluster.channel import SessionChannel
from tests.cli.test_interrupts import handled

WAIT = 60


class Answers(grpc.GenericRpcHandler):
    """Two answers to each call, or one late, and then nothing until the call ends."""

    def service(self, handler_call_details: Any) -> Any:
        answer = self.stream if handler_call_details.method == "/a/stream" else self.late
        return grpc.unary_stream_rpc_method_handler(answer)

    @staticmethod
    def stream(_: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        yield b"1"
        yield b"2"
        yield from Answers.late(_, context)

    @staticmethod
    def late(_: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        over = threading.Event()
        context.add_callback(over.set)
        over.wait(WAIT)
        yield from ()


class InterruptedCall:
    """A call at whose next step the signal comes."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def operate(self, *arguments: Any) -> Any:
        signal.raise_signal(signal.SIGALRM)
        return self._call.operate(*arguments)


@pytest.fixture
def channel() -> Iterator[SessionChannel]:
    server = grpc.server(ThreadPoolExecutor(2), handlers=[Answers()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield SessionChannel(grpc.insecure_channel(f"127.0.0.1:{port}"), b"")
    server.stop(0).wait(WAIT)


def test_a_step_that_is_noted_begins(
    channel: SessionChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    before = set(threading.enumerate())
    stream = channel.plain.unary_stream("/a/stream")(b"")
    own = set(threading.enumerate()) - before
    assert next(stream) == b"1"
    call = stream._call
    stream._call = InterruptedCall(call)
    with handled(interrupt), pytest.raises(KeyboardInterrupt):  # noqa: PT012  # some time later
        next(stream)
        threading.Event().wait(WAIT)
    stream._call = call
    stream.cancel()
    channel.close()
    for each in own:
        if each.name.endswith("(_run)"):  # of the client
            each.join(WAIT)
    assert not failed


@pytest.mark.parametrize("unary", [False, True])
def test_who_waits_for_an_answer_is_interrupted(channel: SessionChannel, unary: bool) -> None:
    """A signal that is held back until the next step would not end the wait."""
    with handled(interrupt), pytest.raises(KeyboardInterrupt):  # noqa: PT012  # it comes at any step
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        if unary:
            channel.plain.unary_unary("/a/late")(b"", timeout=WAIT)
        else:
            next(channel.plain.unary_stream("/a/late")(b""))
    channel.close()
