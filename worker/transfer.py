"""A worker's transfers from and to the master: interrupted when asked, resumed when broken.

Fetches have a connection of their own, so that they neither delay heartbeats nor take the worker's
stream with them when they break.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from plancompiler.cluster.channel import (
    CALL_SECONDS,
    FETCH_METHOD,
    TRANSFER_SERVICE,
    TlsFiles,
    call_error,
    open_channel,
)
from plancompiler.cluster.checked import Sent
from plancompiler.cluster.chunks import Assembler
from plancompiler.errors import AbortedError, ClusterError, PlanCompilerError, WireFormatError
from plancompiler.limits import time_limits
from plancompiler.proto import cluster_pb2 as pb

TRANSFER_SECONDS = time_limits.TRANSFER
"""Deadline of one transfer of a slice, plan, feeds or variables."""
_TRIES = 6
"""Attempts one after another that bring nothing."""
_FIRST_PAUSE = 0.05
"""Seconds before the second attempt; doubled for each later one."""
_BROKEN = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""How a call ends that may go better when it is made again."""


class Interruption:
    """Why the work at hand must stop, once it must. One thread works, any may interrupt."""

    def __init__(self) -> None:
        self.rank: int | None = None
        self._lock = threading.Lock()
        self._is_set = threading.Event()
        self._error: PlanCompilerError | None = None
        self._call: Any = None

    def interrupt(self, error: PlanCompilerError) -> None:
        """Make `check` raise, and cancel the call at hand."""
        with self._lock:
            self._error = error
            call = self._call
            self._is_set.set()
        if call is not None:
            call.cancel()

    def clear(self) -> None:
        """Begin anew."""
        with self._lock:
            self._error = None
            self._is_set.clear()

    def check(self) -> None:
        """Raise AbortedError where the work must stop."""
        with self._lock:
            error = self._error
        if error is not None:
            raise AbortedError("the job was stopped", rank=self.rank, got=str(error))

    def pause(self, seconds: float) -> None:
        """Wait, at most until the work must stop."""
        self._is_set.wait(seconds)

    @contextmanager
    def cancels(self, call: Any) -> Iterator[None]:
        """Let `interrupt` cancel this call. Whatever ends the body early cancels it too: a call
        that is left open, but not read, keeps its place at the master.
        """
        with self._lock:
            self._call = call
        try:
            self.check()
            yield
        except BaseException:
            call.cancel()
            raise
        finally:
            with self._lock:
                self._call = None


class Transfers:
    """The calls of one worker that carry bytes, one at a time. `session` is shown to the master."""

    def __init__(
        self,
        address: str,
        tls: TlsFiles | None,
        interruption: Interruption,
        session: bytes = b"",
    ) -> None:
        self._address = address
        self._tls = tls
        self._interruption = interruption
        self._session = session
        self.pieces = 0
        """How many have come and gone."""
        self._channel: grpc.Channel | None = None
        self._is_stale = False
        """Whether that is of a session of before."""

    def reconnected(self, session: bytes) -> None:
        """Show another session from the next connection on."""
        self._session, self._is_stale = session, True

    def fetch(self, request: pb.FetchRequest, what: str, limit: int) -> bytes:
        """The bytes that a request names, at most `limit` of them. `what` names them in errors.

        A transfer that breaks is made again from where it broke. Raises AbortedError when
        interrupted, WireFormatError for bytes that are not what they announce.
        """
        assembler = Assembler(what, limit)
        asked = pb.FetchRequest()
        asked.CopyFrom(request)
        tries = 0
        while True:
            asked.offset = assembler.received
            try:
                return self._receive(asked, assembler, what)
            except grpc.RpcError as error:
                self._interruption.check()
                tries = 1 if assembler.received > asked.offset else tries + 1
                if tries == _TRIES or error.code() not in _BROKEN:
                    raise call_error(error, self._address) from error
            self.close()
            self._interruption.pause(_FIRST_PAUSE * 2 ** (tries - 1))
            assembler.resume()

    def _receive(self, request: pb.FetchRequest, assembler: Assembler, what: str) -> bytes:
        self._interruption.check()
        if self._is_stale:
            self._is_stale = False
            self.close()
        if self._channel is None:
            self._channel = open_channel(self._address, self._tls, self._session)
        method = self._channel.unary_stream(
            f"/{TRANSFER_SERVICE}/{FETCH_METHOD}",
            pb.FetchRequest.SerializeToString,
            None,
        )
        call = method(Sent()(request), timeout=TRANSFER_SECONDS)
        data = None
        with self._interruption.cancels(call):
            for message in call:
                self.pieces += 1
                if data is not None:
                    raise WireFormatError(f"{what} came with more behind it")
                data = assembler.add_message(message)
        if data is None:
            raise WireFormatError(f"{what} is cut off")
        return data

    def upload(self, method: Any, requests: Iterable[pb.UploadRequest]) -> None:
        """Send a stream of requests by a method of the worker's stub."""
        try:
            call = method.future(iter(requests), timeout=TRANSFER_SECONDS)
            with self._interruption.cancels(call):
                call.result(timeout=TRANSFER_SECONDS + CALL_SECONDS)
        except (grpc.RpcError, grpc.FutureTimeoutError, grpc.FutureCancelledError) as error:
            self._interruption.check()
            if isinstance(error, grpc.RpcError):
                raise call_error(error, self._address) from error
            raise ClusterError(
                "a transfer to the master did not end", got=type(error).__name__
            ) from error

    def close(self) -> None:
        """Close the connection; a later fetch opens another one."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
