"""What the ranks of a job printed, as its client reads it from the master."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc

from plancompiler.cluster.channel import call_error
from plancompiler.cluster.checked import Received, Sent
from plancompiler.cluster.codec import decode
from plancompiler.cluster.messages import RankLine
from plancompiler.errors import UsageError
from plancompiler.ir.arguments import whole_number
from plancompiler.proto import cluster_pb2 as pb
from plancompiler.proto.cluster_pb2_grpc import ClientStub


def read_log(
    stub: ClientStub, address: str, job_id: int, rank: int | None = None, follow: bool = False
) -> Iterator[RankLine]:
    """The lines that the master at `address` keeps of a job, oldest first: of one rank, or of all.

    A line whose `dropped` is not 0 stands for so many lines that were too many to keep. With
    `follow` it goes on until the job has ended and its ranks have let go of it. Raises
    ClusterError for a job that there is not, SecurityError for one of somebody else, UsageError for
    a rank that the job does not have.
    """
    if rank is not None:
        rank = whole_number("the rank", rank)
        if rank < 0:
            raise UsageError("a rank is negative", got=rank)
    request = Sent()(pb.LogsRequest(job_id=job_id, rank=rank, follow=follow))
    stream: Any = stub.Logs(request)
    received = Received("the master")
    try:
        for message in stream:
            for line in received(message).lines:
                yield decode(RankLine, line)
    except grpc.RpcError as error:
        raise call_error(error, address) from error
    finally:
        stream.cancel()
