"""Sends parcels to workers: a few at the same time, each from the offset that the worker asks for.

The service is served without the generated code, because that would serialise each chunk again for
each worker.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc

from plancompiler.cluster.channel import FETCH_METHOD, TRANSFER_SERVICE, abort
from plancompiler.cluster.chunks import Parcel
from plancompiler.errors import DeadlineError, PlanCompilerError
from plancompiler.proto import cluster_pb2 as pb

SIMULTANEOUS = 16
"""Transfers at the same time, unless told otherwise. More of them only slow each other down."""
_POLL_SECONDS = 0.2


class Gate:
    """Lets so many in at a time; the others wait in turn."""

    def __init__(self, places: int) -> None:
        self._places = threading.BoundedSemaphore(places)

    @contextmanager
    def place(self, is_wanted: Callable[[], bool]) -> Iterator[None]:
        """Hold a place. Raises DeadlineError once nobody wants it any longer."""
        while not self._places.acquire(timeout=_POLL_SECONDS):
            if not is_wanted():
                raise DeadlineError("a transfer was given up before its turn came")
        try:
            yield
        finally:
            self._places.release()


class TransferService:
    """Serves `Transfer.Fetch`.

    `find` gives the parcel of a request or raises; `count` hears of the bytes that were sent.
    """

    def __init__(
        self,
        find: Callable[[pb.FetchRequest], Parcel],
        count: Callable[[pb.FetchRequest, int], None],
        gate: Gate,
    ) -> None:
        self._find = find
        self._count = count
        self._gate = gate

    def fetch(self, request: pb.FetchRequest, context: grpc.ServicerContext) -> Iterator[bytes]:
        """The serialised chunks of what a worker asks for."""
        try:
            with self._gate.place(context.is_active):
                for message in self._find(request).messages_from(request.offset):
                    # Counted first: a worker says that it has all before this call goes on.
                    self._count(request, len(message))
                    yield message
        except PlanCompilerError as error:
            abort(context, error)

    def add_to(self, server: grpc.Server) -> None:
        """Serve on a server."""
        handler = grpc.unary_stream_rpc_method_handler(
            self.fetch, request_deserializer=pb.FetchRequest.FromString
        )
        handlers = {FETCH_METHOD: handler}
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(TRANSFER_SERVICE, handlers),)
        )
