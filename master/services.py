"""What the master offers over gRPC: one service for clients, one for workers.

A service only carries bytes; all decisions are the state machine's.
"""

# ruff: noqa: N802  (methods are named as in cluster.proto)

from __future__ import annotations

import math
import threading
from collections.abc import Iterator

import grpc

from plancompiler.cluster.channel import abort, software_version
from plancompiler.cluster.chunks import (
    MAX_ARRAYS_BYTES,
    MAX_JOB_BYTES,
    Assembler,
    pack,
    transfers,
)
from plancompiler.cluster.messages import JobRequest, Phase, Refused
from plancompiler.cluster.serde import (
    WorkerReader,
    event_to_protos,
    master_message_to_proto,
    status_to_proto,
)
from plancompiler.errors import (
    ClusterError,
    PlanCompilerError,
    UsageError,
    VersionError,
    WireFormatError,
)
from plancompiler.ir import verify_job
from plancompiler.master.edge import Connection, MasterEdge
from plancompiler.master.events import (
    CancelAsked,
    CollectAsked,
    FinishAsked,
    FromWorker,
    SaveAsked,
    StepAsked,
)
from plancompiler.master.job_channel import Relay
from plancompiler.plan.job_serde import job_from_bytes
from plancompiler.proto import cluster_pb2 as pb
from plancompiler.proto import cluster_pb2_grpc as pb_grpc

_MAX_STEPS = 1 << 40


class ClientService(pb_grpc.ClientServicer):
    """What clients may ask for."""

    def __init__(self, edge: MasterEdge) -> None:
        self._edge = edge

    def Submit(
        self, request_iterator: Iterator[pb.SubmitRequest], context: grpc.ServicerContext
    ) -> pb.SubmitReply:
        try:
            first = next(request_iterator, None)
            if first is None or not first.HasField("header"):
                raise WireFormatError("a submission does not start with its header")
            header = first.header
            _check_version(header.version)
            if header.steps > _MAX_STEPS:
                raise UsageError("too many steps", got=header.steps, expected=_MAX_STEPS)
            if not 0 <= header.deadline < math.inf:
                raise UsageError("the deadline must be positive seconds", got=header.deadline)
            assembler = Assembler("the job", MAX_JOB_BYTES)
            data = None
            for message in request_iterator:
                data = assembler.add(message.chunk)
                if data is not None:
                    break
            if data is None:
                raise WireFormatError("the job is cut off")
            job = job_from_bytes(data)
            verify_job(job)
            request = JobRequest(
                header.steps,
                header.mode,
                header.open,
                header.restore,
                header.save,
                header.cache,
                header.save_every,
                header.deadline,
                header.record,
            )
            job_id = self._edge.submit(job, request)
        except PlanCompilerError as error:
            abort(context, error)
        return pb.SubmitReply(job_id=job_id, world_size=self._edge.world_size)

    def Watch(self, request: pb.JobRequest, context: grpc.ServicerContext) -> Iterator[pb.JobEvent]:
        job_id = request.job_id
        try:
            channel = self._edge.channel(job_id)
            try:
                for event in channel.read(context.is_active):
                    if event is None:
                        if self._edge.is_stopping:
                            return
                        yield pb.JobEvent(alive=True)
                    else:
                        yield from event_to_protos(event)
            finally:
                # An open job has nobody else who would ask it for anything.
                if channel.request.open:
                    self._edge.handle(CancelAsked(job_id, "its client went away"))
        except PlanCompilerError as error:
            abort(context, error)

    def Step(
        self, request_iterator: Iterator[pb.StepRequest], context: grpc.ServicerContext
    ) -> pb.OperationReply:
        try:
            first = next(request_iterator, None)
            if first is None or not 0 < first.steps <= _MAX_STEPS:
                raise WireFormatError("a request for steps does not say how many")
            channel = self._edge.channel(first.job_id)
            chunks = (message.chunk for message in request_iterator)
            feeds = list(transfers(chunks, "the feeds", MAX_ARRAYS_BYTES))
            if len(feeds) > 1:
                raise WireFormatError("a step is fed twice")
            ticket = self._edge.next_ticket()
            if feeds:
                channel.feeds[ticket] = pack(feeds[0])
            try:
                self._edge.handle(StepAsked(first.job_id, ticket, first.steps, bool(feeds)))
            except PlanCompilerError:
                channel.feeds.pop(ticket, None)
                raise
        except PlanCompilerError as error:
            abort(context, error)
        return pb.OperationReply(ticket=ticket)

    def Save(self, request: pb.SaveRequest, context: grpc.ServicerContext) -> pb.OperationReply:
        ticket = self._edge.next_ticket()
        try:
            self._edge.handle(
                SaveAsked(request.job_id, ticket, request.directory, request.background)
            )
        except PlanCompilerError as error:
            abort(context, error)
        return pb.OperationReply(ticket=ticket)

    def Finish(self, request: pb.JobRequest, context: grpc.ServicerContext) -> pb.OperationReply:
        try:
            self._edge.handle(FinishAsked(request.job_id))
        except PlanCompilerError as error:
            abort(context, error)
        return pb.OperationReply()

    def FetchVariables(
        self, request: pb.JobRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.Chunk]:
        try:
            channel = self._edge.channel(request.job_id)
            ticket = self._edge.next_ticket()
            relay = channel.relays[ticket] = Relay(self._edge.world_size)
            try:
                self._edge.handle(CollectAsked(request.job_id, ticket))
                yield from relay.chunks(context.is_active)
            finally:
                relay.close()
                channel.relays.pop(ticket, None)
        except PlanCompilerError as error:
            abort(context, error)

    def Cancel(self, request: pb.JobRequest, context: grpc.ServicerContext) -> pb.CancelReply:
        try:
            ended = self._edge.phase(request.job_id).is_end
            self._edge.handle(CancelAsked(request.job_id, "a client asked for it"))
            cancelled = not ended and self._edge.phase(request.job_id) is Phase.CANCELLED
        except PlanCompilerError as error:
            abort(context, error)
        return pb.CancelReply(cancelled=cancelled)

    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusReply:
        return status_to_proto(self._edge.status())


class WorkerService(pb_grpc.WorkerServicer):
    """What workers may ask for, and the stream that each of them holds."""

    def __init__(self, edge: MasterEdge) -> None:
        self._edge = edge

    def Connect(
        self, request_iterator: Iterator[pb.WorkerMessage], context: grpc.ServicerContext
    ) -> Iterator[pb.MasterMessage]:
        connection = self._edge.connect()
        reader = threading.Thread(
            target=self._read,
            args=(connection, request_iterator),
            name="plancompiler-worker-stream",
            daemon=True,
        )
        reader.start()
        try:
            while (message := connection.outbox.get()) is not None:
                yield master_message_to_proto(message)
        finally:
            self._edge.disconnect(connection)

    def _read(self, connection: Connection, messages: Iterator[pb.WorkerMessage]) -> None:
        """Hand a worker's messages to the state machine until its stream ends."""
        reader = WorkerReader()
        try:
            for proto in messages:
                message = reader.read(proto)
                if message is not None:
                    self._edge.from_worker(connection, FromWorker(connection.number, message))
        except PlanCompilerError as error:
            connection.outbox.put(Refused(error.report))
        except Exception:
            pass
        finally:
            connection.outbox.put(None)

    def Upload(
        self, request_iterator: Iterator[pb.UploadRequest], context: grpc.ServicerContext
    ) -> pb.UploadReply:
        try:
            first = next(request_iterator, None)
            if first is None:
                raise WireFormatError("an upload does not say what it is")
            rank = self._edge.rank_of_token(first.token)
            relay = self._edge.channel(first.job_id).relays.get(first.ticket)
            if relay is None:
                raise ClusterError("nobody waits for these variables any longer", rank=rank)
            for message in request_iterator:
                relay.put(rank, message.chunk, context.is_active)
            relay.put(rank, None, context.is_active)
        except PlanCompilerError as error:
            abort(context, error)
        return pb.UploadReply()


def _check_version(version: str) -> None:
    own = software_version()
    if version.split(".")[:2] != own.split(".")[:2]:
        raise VersionError(
            f"a client of version {version} cannot use a master of version {own}",
            got=f"client {version}",
            expected=f"the master's major and minor version, {own}",
            hint="install the same version on both sides",
        )
