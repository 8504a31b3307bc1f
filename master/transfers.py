"""Sends parcels to workers: a few at the same time, each from the offset that the worker asks for.

The service is served without the generated code, because that would serialise each chunk again for
each worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from plancompiler.cluster.channel import FETCH_METHOD, TRANSFER_SERVICE, refuse
from plancompiler.cluster.checked import Received
from plancompiler.cluster.chunks import Parcel
from plancompiler.errors import PlanCompilerError
from plancompiler.proto import cluster_pb2 as pb

SIMULTANEOUS = 16
"""Transfers at the same time, unless told otherwise. More of them only slow each other down."""

Context = grpc.aio.ServicerContext[Any, Any]


class Gate:
    """Lets so many in at a time; the others wait in turn."""

    def __init__(self, places: int) -> None:
        self._places = asyncio.Semaphore(places)

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Hold a place."""
        async with self._places:
            yield


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

    async def fetch(self, request: pb.FetchRequest, context: Context) -> None:
        """Send the serialised chunks of what a worker asks for."""
        try:
            async with self._gate.place():
                for message in self._find(Received("a worker")(request)).messages_from(
                    request.offset
                ):
                    # Counted first: a worker says that it has all before this call goes on.
                    self._count(request, len(message))
                    await context.write(message)
        except PlanCompilerError as error:
            await refuse(context, error)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve on a server."""
        handler = grpc.unary_stream_rpc_method_handler(
            self.fetch, request_deserializer=pb.FetchRequest.FromString
        )
        handlers = {FETCH_METHOD: handler}
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(TRANSFER_SERVICE, handlers),)
        )
