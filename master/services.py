"""What the master offers over gRPC: one service for clients, one for workers.

A service only carries bytes; all decisions are the state machine's. Calls are coroutines of the
master's event loop, so that one that waits costs no thread.
"""

# ruff: noqa: N802  (methods are named as in cluster.proto)

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError

from plancompiler.cluster.channel import refuse
from plancompiler.cluster.checked import Received, Sent
from plancompiler.cluster.chunks import (
    MAX_ARRAYS_BYTES,
    MAX_JOB_BYTES,
    Assembler,
    Parcel,
    Reservation,
    UploadBudget,
    pack,
)
from plancompiler.cluster.codec import decode, encode
from plancompiler.cluster.messages import (
    Collect,
    Finish,
    Heartbeat,
    JobPhase,
    JobRequest,
    Refused,
    Run,
    Save,
)
from plancompiler.cluster.serde import (
    JOB_EVENTS,
    MASTER_MESSAGES,
    WORKER_MESSAGES,
    Reader,
    grouped,
)
from plancompiler.cluster.token import OPERATE
from plancompiler.errors import (
    ClusterError,
    DeadlineError,
    ErrorReport,
    LimitError,
    PlanCompilerError,
    SecurityError,
    UsageError,
    VersionError,
    WireFormatError,
)
from plancompiler.ir import Job, verify_job
from plancompiler.ir.arguments import job_name
from plancompiler.limits import time_limits
from plancompiler.master.admission import CALLER
from plancompiler.master.events import (
    Asked,
    CancelAsked,
    FromWorker,
)
from plancompiler.master.io_shell import Connection, MasterShell
from plancompiler.master.job_channel import JobChannel, Relay
from plancompiler.master.registration import check_worker_version
from plancompiler.master.work_threads import WorkThreads
from plancompiler.ops.verify_types import verify_types
from plancompiler.plan.job_serde import job_from_bytes
from plancompiler.proto import cluster_pb2 as pb
from plancompiler.proto import cluster_pb2_grpc as pb_grpc
from plancompiler.proto.cluster_pb2 import Chunk
from plancompiler.version import VERSION

_log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
Request = TypeVar("Request")
Reply = TypeVar("Reply")

_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # its stubs lack it
_MAX_STEPS = 1 << 40
MAX_OPS = 1_000_000
"""Of one job."""
_MAX_TEXT = 4096
"""Characters of a job's name and of the paths that it names."""
_UPLOAD_SECONDS = time_limits.UPLOAD
"""How long one submission, feed or upload may take."""
_READERS = 2
"""Submissions and feeds that are unpacked at the same time."""
_INLINE_BYTES = 256 << 10
"""Less is copied in the event loop: handing it to a thread would take longer."""
_INLINE_JOB_BYTES = 64 << 10
"""The same for a job, which is read."""


def _answering(
    method: Callable[[Any, Request, Context], Awaitable[Reply]],
) -> Callable[[Any, Request, Context], Awaitable[Reply]]:
    """A call that ends with our own error where the method raises one."""

    @functools.wraps(method)
    async def answer(service: Any, request: Request, context: Context) -> Reply:
        try:
            return await method(service, request, context)
        except PlanCompilerError as error:
            await refuse(context, error)

    return answer


async def _next(context: Context, what: str, seconds: float) -> Any:
    """The next message of a stream that must say something; None at its end.

    Raises DeadlineError after so many seconds without one: such a stream would hold memory and a
    place for ever.
    """
    try:
        return await asyncio.wait_for(_read_message(context, what), seconds)
    except TimeoutError:
        raise DeadlineError(
            f"the master ended a stream that said nothing: {what} did not come",
            got=f"no message for {seconds:g} s",
            hint="the option --stream-silence of `plancompiler master` sets this limit",
        ) from None


async def _read_message(context: Context, what: str) -> Any:
    """The next message of a stream; None at its end. WireFormatError for what is none."""
    try:
        message = await context.read()
    except DecodeError as error:
        raise WireFormatError(f"{what} is not a message of this protocol", got=error) from error
    return None if message is _EOF else message


class Unpacking:
    """Puts together what clients and workers upload, outside of the event loop where it is large.
    A stream that says nothing for `silence` seconds is ended; what comes is held within `budget`.
    """

    def __init__(self, silence: float, budget: UploadBudget) -> None:
        self._silence = silence
        self._budget = budget
        self._threads = WorkThreads("plancompiler-unpack", _READERS)

    @contextmanager
    def reservation(self) -> Iterator[Reservation]:
        """What an upload holds of the budget; given back where the block fails."""
        reservation = Reservation(self._budget)
        try:
            yield reservation
        except BaseException:
            reservation.close()
            raise

    async def receive(
        self,
        context: Context,
        what: str,
        limit: int,
        reservation: Reservation,
        received: Received,
    ) -> bytes | None:
        """The one transfer in what is left of a stream of requests; None where there is none."""
        first = await _next(context, what, self._silence)
        if first is None:
            return None
        chunk = received(first).chunk
        data = await self.rest(context, what, limit, reservation, received, chunk)
        if await _next(context, what, self._silence) is not None:
            raise WireFormatError(f"{what} came with more behind it")
        return data

    async def rest(
        self,
        context: Context,
        what: str,
        limit: int,
        reservation: Reservation,
        received: Received,
        chunk: Chunk,
    ) -> bytes:
        """The transfer that begins with this chunk and goes on in the requests behind it."""
        assembler = Assembler(what, limit, reservation)
        data = await self._add(assembler, chunk)
        try:
            async with asyncio.timeout(_UPLOAD_SECONDS):
                while data is None:
                    message = await _next(context, what, self._silence)
                    if message is None:
                        raise WireFormatError(f"{what} is cut off")
                    data = await self._add(assembler, received(message).chunk)
        except TimeoutError:
            raise DeadlineError(
                f"{what} did not arrive in time", expected=f"within {_UPLOAD_SECONDS:g} s"
            ) from None
        reservation.keep(len(data))
        return data

    async def job(self, data: bytes) -> Job:
        """The job in these bytes."""
        return await self._in_thread_unless(len(data) <= _INLINE_JOB_BYTES, _read_job, data)

    async def parcel(self, data: bytes) -> Parcel:
        """Bytes that others fetch."""
        return await self._in_thread_unless(len(data) <= _INLINE_BYTES, pack, data)

    async def _add(self, assembler: Assembler, chunk: Chunk) -> bytes | None:
        return await self._in_thread_unless(len(chunk.data) <= _INLINE_BYTES, assembler.add, chunk)

    async def _in_thread_unless(
        self, is_small: bool, function: Callable[..., Reply], *args: Any
    ) -> Reply:
        """What a function returns, which a thread runs unless it has little to do."""
        if is_small:
            return function(*args)
        return await self._threads.run(function, *args)


def _read_job(data: bytes) -> Job:
    job = job_from_bytes(data)
    verify_job(job)
    verify_types(job)
    return job


class ClientService(pb_grpc.ClientServicer):
    """What clients may ask for. A stream that says nothing for `silence` seconds is ended."""

    def __init__(
        self, shell: MasterShell, silence: float, unpacking: Unpacking, max_ops: int = MAX_OPS
    ) -> None:
        self._shell = shell
        self._max_ops = max_ops
        self._silence = silence
        self._unpacking = unpacking

    @_answering
    async def Submit(self, _: AsyncIterator[pb.SubmitRequest], context: Context) -> pb.SubmitReply:
        received = Received("a client")
        first = await _next(context, "the header of a submission", self._silence)
        if first is None or not first.HasField("header"):
            raise WireFormatError("a submission does not start with its header")
        header = first.header
        _check_version(header.version)  # before its check: other versions may have another one
        received(first)
        if header.steps > _MAX_STEPS:
            raise UsageError("too many steps", got=header.steps, expected=_MAX_STEPS)
        if not 0 <= header.deadline < math.inf:
            raise UsageError("the deadline must be positive seconds", got=header.deadline)
        for text in (header.mode, header.restore, header.save, header.name):
            if len(text) > _MAX_TEXT:
                raise UsageError(
                    "a text of a submission is too long", got=len(text), expected=_MAX_TEXT
                )
        job_name(header.name)
        request = decode(JobRequest, header)
        with self._unpacking.reservation() as held:
            data = await self._unpacking.receive(context, "the job", MAX_JOB_BYTES, held, received)
            if data is None:
                raise WireFormatError("the job is cut off")
            job = await self._unpacking.job(data)
            if len(job.name) > _MAX_TEXT:
                raise UsageError(
                    "the name of a job is too long", got=len(job.name), expected=_MAX_TEXT
                )
            if len(job.ops) > self._max_ops:
                raise LimitError(
                    "the job has too many ops for this master",
                    got=len(job.ops),
                    expected=f"at most {self._max_ops}",
                    hint="start the master with a larger --max-ops",
                )
            job_id = self._shell.submit(job, data, request, CALLER.get().name, held)
        asyncio.get_running_loop().call_later(self._silence, self._end_unwatched, job_id)
        reply = pb.SubmitReply(
            job_id=job_id,
            world_size=request.ranks or job.world_size,
        )
        return Sent()(reply)

    @_answering
    async def Watch(self, request: pb.JobRequest, context: Context) -> None:
        job_id = Received("a client")(request).job_id
        channel = self._own(job_id)
        channel.is_awaited = False
        sent = Sent()
        try:
            async for events in channel.read(request.since):
                if not events and self._shell.is_stopping:
                    return
                parts = (part for event in events for part in JOB_EVENTS.write(event))
                for group in grouped(parts) if events else ([],):
                    await context.write(sent(pb.JobEvents(events=group)))
        finally:
            # An open job has nobody else who would ask it for anything.
            if channel.request.open and not request.beside:
                self._shell.take(CancelAsked(job_id, "its client went away"))

    def _end_unwatched(self, job_id: int) -> None:
        """Wait no longer for a client that has not begun to listen: it went away, and an open job
        has nobody else.
        """
        with suppress(PlanCompilerError):
            channel = self._shell.channel(job_id)
            if channel.is_awaited:
                channel.is_awaited = False
                if channel.request.open:
                    self._shell.take(CancelAsked(job_id, "its client never listened to it"))

    @_answering
    async def Step(self, _: AsyncIterator[pb.StepRequest], context: Context) -> None:
        received, sent = Received("a client"), Sent()
        request = await _next(context, "a request for steps", self._silence)
        if request is None:
            raise WireFormatError("nothing was asked for in a stream of requests for steps")
        while request is not None:
            ticket = await self._ask_steps(received(request), context, received)
            await asyncio.sleep(0)  # the workers are told first: who asked waits for them anyway
            await context.write(sent(pb.OperationReply(ticket=ticket)))
            request = await self._next_request(context, request.job_id)

    async def _ask_steps(
        self, request: pb.StepRequest, context: Context, received: Received
    ) -> int:
        """Take a request for steps, whose feeds may go on behind it; its ticket."""
        if not 0 < request.steps <= _MAX_STEPS:
            raise WireFormatError("a request for steps does not say how many")
        channel = self._own(request.job_id)
        is_fed = request.HasField("chunk")
        with self._unpacking.reservation() as held:
            ticket = self._shell.next_ticket()
            if is_fed:
                feeds = await self._unpacking.rest(
                    context, "the feeds", MAX_ARRAYS_BYTES, held, received, request.chunk
                )
                channel.keep_feeds(ticket, await self._unpacking.parcel(feeds), held)
            try:
                self._shell.handle(Asked(Run(request.job_id, ticket, request.steps, is_fed)))
            except PlanCompilerError:
                channel.drop_feeds(ticket)
                raise
        return ticket

    async def _next_request(self, context: Context, job_id: int) -> Any:
        """The next request for steps of a job; None at the end of the stream. A client may take its
        time, but not after the job's end: raises why that has ended.
        """
        reading = asyncio.create_task(_read_message(context, "a request for steps"))
        reading.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            while not (await asyncio.wait({reading}, timeout=self._silence))[0]:
                job = self._shell.job_status(job_id)
                if job.error is not None:
                    raise PlanCompilerError.from_report(job.error)
                if job.phase.is_end:
                    raise ClusterError(f"job {job_id} has ended", got=f"phase {job.phase}")
            return reading.result()
        finally:
            reading.cancel()

    @_answering
    async def Save(self, request: pb.SaveRequest, context: Context) -> pb.OperationReply:
        channel = self._own(Received("a client")(request).job_id)
        ticket = self._shell.next_ticket()
        self._shell.handle(
            Asked(Save(request.job_id, ticket, request.directory, request.background))
        )
        channel.saved = request.directory
        return Sent()(pb.OperationReply(ticket=ticket))

    @_answering
    async def Finish(self, request: pb.JobRequest, context: Context) -> pb.OperationReply:
        self._own(Received("a client")(request).job_id)
        self._shell.handle(Asked(Finish(request.job_id)))
        return Sent()(pb.OperationReply())

    @_answering
    async def FetchVariables(self, request: pb.JobRequest, context: Context) -> None:
        channel = self._own(Received("a client")(request).job_id)
        ticket = self._shell.next_ticket()
        relay: Relay[Chunk] = Relay(self._shell.ranks_of(request.job_id))
        channel.relays[ticket] = relay
        try:
            self._shell.handle(Asked(Collect(request.job_id, ticket)))
            async for chunk in relay.chunks():
                await context.write(chunk)
        finally:
            relay.close()
            channel.relays.pop(ticket, None)

    @_answering
    async def Cancel(self, request: pb.JobRequest, context: Context) -> pb.CancelReply:
        Received("a client")(request)
        job_id = request.job_id
        if request.key:
            submitted = self._shell.job_of_key(CALLER.get().name, request.key)
            if submitted is None:
                return Sent()(pb.CancelReply(cancelled=False))
            job_id = submitted
        self._own(job_id)
        ended = self._shell.phase(job_id).is_end
        self._shell.handle(CancelAsked(job_id, "a client asked for it"))
        cancelled = not ended and self._shell.phase(job_id) is JobPhase.CANCELLED
        return Sent()(pb.CancelReply(cancelled=cancelled))

    @_answering
    async def FetchPlans(self, request: pb.JobRequest, context: Context) -> None:
        job_id = Received("a client")(request).job_id
        channel = self._own(job_id)
        channel.is_awaited = False
        channel.readers += 1  # what a reader has asked for is kept for it
        try:
            await self._shell.provide_plans(job_id)
            job = await self._unpacking.parcel(channel.data)
            sent, world_size = Sent(), self._shell.ranks_of(job_id)
            for kind, ranks, parcel in [("job", (), job), *channel.compiled_parts()]:
                for number, message in enumerate(parcel.messages):
                    part = pb.PlanPart(chunk=Chunk.FromString(message))
                    if not number:
                        part.kind, part.digest, part.world_size = kind, channel.digest, world_size
                        part.ranks.extend(ranks)
                    await context.write(sent(part))
        finally:
            channel.readers -= 1

    @_answering
    async def Describe(self, request: pb.JobRequest, context: Context) -> pb.DescribeReply:
        self._own(Received("a client")(request).job_id)
        job = encode(pb.JobStatus, self._shell.job_status(request.job_id))
        return Sent()(pb.DescribeReply(job=job))

    @_answering
    async def FetchCheckpoint(self, request: pb.JobRequest, context: Context) -> None:
        job_id = Received("a client")(request).job_id
        self._own(job_id)
        relay: Relay[pb.FilePart] = Relay(1)
        ticket = self._shell.request_files(job_id, relay)
        sent = Sent()
        try:
            async for part in relay.chunks():
                await context.write(sent(part))
        except ClusterError as error:
            raise relay.error or error from None
        finally:
            self._shell.end_files(ticket)

    @_answering
    async def Logs(self, request: pb.LogsRequest, context: Context) -> None:
        wanted = Received("a client")(request)
        log = self._own(wanted.job_id).log
        rank = None
        if wanted.HasField("rank"):
            rank, ranks = wanted.rank, self._shell.ranks_of(wanted.job_id)
            if rank >= ranks:
                raise UsageError(
                    f"job {wanted.job_id} has no such rank", got=rank, expected=f"0 to {ranks - 1}"
                )
        sent = Sent()
        async for lines in log.read(rank, wanted.follow):
            await context.write(
                sent(pb.LogsReply(lines=[encode(pb.RankLine, line) for line in lines]))
            )

    @_answering
    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.ClusterStatus:
        Received("a client")(request)
        caller = CALLER.get()
        owner = None if OPERATE in caller.roles else caller.name
        return Sent()(encode(pb.ClusterStatus, self._shell.status(owner)))

    def _own(self, job_id: int) -> JobChannel:
        """A job's things; SecurityError for a job of somebody else, unless the caller operates."""
        channel = self._shell.channel(job_id)
        caller = CALLER.get()
        if channel.owner != caller.name and OPERATE not in caller.roles:
            raise SecurityError(
                f"job {job_id} belongs to somebody else",
                got=f"a token of {caller.name} with {', '.join(sorted(caller.roles))}",
                expected="the token of whoever submitted it, or one with the role operate",
            )
        return channel


class WorkerService(pb_grpc.WorkerServicer):
    """What workers may ask for, and the stream that each of them holds."""

    def __init__(self, shell: MasterShell, silence: float, unpacking: Unpacking) -> None:
        self._shell = shell
        self._silence = silence
        self._unpacking = unpacking

    @_answering
    async def Connect(self, _: AsyncIterator[pb.WorkerMessages], context: Context) -> None:
        connection = self._shell.connect()
        reading = asyncio.create_task(self._read(connection, context))
        sent = Sent()
        try:
            while (message := await connection.outbox.get()) is not None:
                for proto in MASTER_MESSAGES.write(message):
                    await context.write(sent(proto))
        finally:
            reading.cancel()
            self._shell.disconnect(connection)

    async def _read(self, connection: Connection, context: Context) -> None:
        """Hand a worker's messages to the state machine until its stream ends."""
        reader, received = Reader(WORKER_MESSAGES), Received("a worker")
        try:
            group = await _next(context, "the registration of a worker", self._silence)
            for proto in group.messages if group is not None else ():
                if proto.HasField("register"):  # before its check
                    check_worker_version(proto.register.version, VERSION)
            while group is not None:
                for proto in received(group).messages:
                    message = reader.read(proto)
                    if message is not None:
                        event = FromWorker(connection.number, message, proto.number)
                        self._shell.from_worker(connection, event)
                group = await _read_message(context, "a message of a worker")
        except PlanCompilerError as error:
            self._shell.disconnect(connection, error.report)
            connection.outbox.put_nowait(Refused(error.report))
        except grpc.aio.BaseError as error:
            _log.debug("the stream of a worker broke: %s", error)
        finally:
            connection.outbox.put_nowait(None)

    @_answering
    async def Upload(self, _: AsyncIterator[pb.UploadRequest], context: Context) -> pb.UploadReply:
        received = Received("a worker")
        first = await _next(context, "an upload", self._silence)
        if first is None:
            raise WireFormatError("an upload does not say what it is")
        received(first)
        rank = self._shell.rank_of_token(first.token, first.job_id)
        channel = self._shell.channel(first.job_id)
        if channel.request.compile_only:
            await self._take_plan(context, first.job_id, channel, rank, received)
            return Sent()(pb.UploadReply())
        relay = channel.relays.get(first.ticket)
        if relay is None:
            raise ClusterError("nobody waits for these variables any longer", rank=rank)
        while (message := await _next(context, "an upload", self._silence)) is not None:
            await relay.put(rank, received(message).chunk)
        await relay.put(rank, None)
        return Sent()(pb.UploadReply())

    async def _take_plan(
        self, context: Context, job_id: int, channel: JobChannel, rank: int, received: Received
    ) -> None:
        with self._unpacking.reservation() as held:
            plan = await self._unpacking.receive(context, "a plan", MAX_JOB_BYTES, held, received)
            if plan is None or rank in channel.plans:
                raise WireFormatError("a plan came twice, or not at all", rank=rank)
            parcel = await self._unpacking.parcel(plan)
            held.keep(parcel.wire_bytes)
            channel.keep_plan(rank, parcel, held)
            self._shell.save_plan(job_id, rank, parcel)

    @_answering
    async def UploadFiles(
        self, _: AsyncIterator[pb.FileUpload], context: Context
    ) -> pb.UploadReply:
        received = Received("a worker")
        first = await _next(context, "files", self._silence)
        if first is None:
            raise WireFormatError("an upload of files does not say what it is")
        received(first)
        relay = self._shell.files_wanted(first.token, first.ticket)
        try:
            while (message := await _next(context, "files", self._silence)) is not None:
                if received(message).HasField("error"):
                    report = decode(ErrorReport, message.error)
                    relay.error = PlanCompilerError.from_report(report)
                    return Sent()(pb.UploadReply())
                message.part.check = 0
                await relay.put(0, message.part)
            await relay.put(0, None)
        except PlanCompilerError as error:
            relay.error = error
            raise
        finally:
            relay.end()
        return Sent()(pb.UploadReply())

    @_answering
    async def Beat(self, request: pb.BeatRequest, context: Context) -> pb.BeatReply:
        heartbeat = decode(Heartbeat, Received("a worker")(request).heartbeat)
        if request.token:
            self._shell.beat(request.token, heartbeat)
        elif heartbeat.stopped:
            self._shell.stopped_early(request.rank, request.host[:_MAX_TEXT])
        return Sent()(pb.BeatReply())


def _check_version(version: str) -> None:
    own = VERSION
    if version.split(".")[:2] != own.split(".")[:2]:
        raise VersionError(
            f"a client of version {version} cannot use a master of version {own}",
            got=f"client {version}",
            expected=f"the master's major and minor version, {own}",
            hint="install the same version on both sides",
        )
