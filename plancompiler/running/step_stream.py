"""The stream over which the client of an open job asks for steps, and is told their tickets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import Any

import grpc

from plancompiler.cluster.channel import call_error
from plancompiler.cluster.checked import Received, Sent
from plancompiler.errors import ClusterError
from plancompiler.proto import cluster_pb2 as pb
from plancompiler.proto.cluster_pb2_grpc import ClientStub

Requests = SimpleQueue[pb.StepRequest | None]


class StepStream:
    """Asks for steps of one job, in one call that is kept open: to begin a call takes longer than a
    small step. One that has failed is not used again; the next request begins another.
    """

    def __init__(self, stub: ClientStub, address: str, job_id: int) -> None:
        self._stub = stub
        self._address = address
        self._job_id = job_id
        self._call: Any = None
        self._requests: Requests = SimpleQueue()
        """Of the call at hand; None ends it."""
        self._received = Received("the master")

    def ask(self, steps: int, feeds: Sequence[pb.Chunk]) -> int:
        """The ticket of a request for steps with these feeds; raises why the master refuses it."""
        if self._call is None:
            self._begin()
        first, *others = feeds or (None,)
        self._requests.put(pb.StepRequest(job_id=self._job_id, steps=steps, chunk=first))
        for chunk in others:
            self._requests.put(pb.StepRequest(chunk=chunk))
        try:
            return self._answer()
        except BaseException:  # what comes next would be the answer to this request
            self.close()
            raise

    def _answer(self) -> int:
        try:
            reply = next(self._call, None)
        except grpc.RpcError as error:
            raise call_error(error, self._address) from error
        if reply is None:
            raise ClusterError("the master ended a stream of requests without an answer")
        return int(self._received(reply).ticket)

    def _begin(self) -> None:
        requests: Requests = SimpleQueue()
        self._requests, self._received = requests, Received("the master")
        self._call = self._stub.Step(_checked(requests))
        # Whatever ends the call, the thread of gRPC that sends its requests ends with it.
        if not self._call.add_callback(lambda: requests.put(None)):
            requests.put(None)

    def close(self) -> None:
        """End the call, if there is one."""
        call, self._call = self._call, None
        if call is not None:
            call.cancel()


def _checked(requests: Requests) -> Iterator[pb.StepRequest]:
    sent = Sent()
    while (request := requests.get()) is not None:
        yield sent(request)
