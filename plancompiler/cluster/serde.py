"""The messages of `cluster.messages` as protobuf, and back.

Messages that can be large (facts, outputs) become several protobuf messages; `WorkerReader` and
`EventReader` put them together again, within bounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from plancompiler.cluster.chunks import MAX_ARRAYS_BYTES, MAX_JOB_BYTES, Assembler, to_chunks
from plancompiler.cluster.messages import (
    Abort,
    ClusterStatus,
    Collect,
    Compile,
    Compiled,
    CompileFinished,
    Failed,
    Fetched,
    Finish,
    Heartbeat,
    Idle,
    JobEvent,
    JobStatus,
    LocalCopy,
    MasterMessage,
    OperationDone,
    Outputs,
    PeerAddress,
    Phase,
    PhaseChanged,
    Prepare,
    Prepared,
    RankOutputs,
    RankTimeline,
    Recorded,
    Refused,
    Register,
    Registered,
    Run,
    RunFailed,
    Save,
    SendTimeline,
    Shipped,
    StepDone,
    StepsDropped,
    StepsFailed,
    TicketDone,
    Waiting,
    WorkerMessage,
    WorkerStatus,
    WriteIndex,
    Written,
)
from plancompiler.errors import ErrorReport, WireFormatError
from plancompiler.ir.wire import build, split
from plancompiler.plan.digest import CrossRankFact
from plancompiler.proto import cluster_pb2 as pb

_FACTS_PER_MESSAGE = 1024
_MAX_FACTS = 1 << 20
_MAX_FACT_BYTES = 256 << 20
_KERNELS_CHARACTERS = 1 << 10
_MAX_TEXT = 16 << 10
"""Characters of a part of an error report that cross the wire."""


# --- errors ---------------------------------------------------------------------------------------


def report_to_proto(report: ErrorReport) -> pb.ErrorReport:
    """An error report; over-long parts are cut."""
    message = pb.ErrorReport(code=report.code, what=report.what[:_MAX_TEXT], rank=report.rank)
    for name in ("op", "source", "got", "expected", "hint"):
        value = getattr(report, name)
        if value is not None:
            setattr(message, name, value[:_MAX_TEXT])
    return message


def report_from_proto(message: pb.ErrorReport) -> ErrorReport:
    """The error report in a message."""

    def optional(name: str) -> str | None:
        return getattr(message, name)[:_MAX_TEXT] if message.HasField(name) else None

    return ErrorReport(
        code=message.code[:_MAX_TEXT],
        what=message.what[:_MAX_TEXT],
        op=optional("op"),
        source=optional("source"),
        rank=message.rank if message.HasField("rank") else None,
        got=optional("got"),
        expected=optional("expected"),
        hint=optional("hint"),
    )


# --- worker to master -----------------------------------------------------------------------------


def worker_message_to_protos(message: WorkerMessage) -> Iterator[pb.WorkerMessage]:
    """A worker's message as one or more protobuf messages."""
    match message:
        case Register():
            register = pb.Register(
                rank=-1 if message.rank is None else message.rank,
                host=message.host,
                device=message.device,
                version=message.version,
                host_id=message.host_id,
                peer_address=message.peer_address,
                network=message.network,
                is_loopback=message.is_loopback,
                deadline=message.deadline,
            )
            yield pb.WorkerMessage(register=register)
        case Heartbeat(stopped, cpu_seconds, gets_on):
            heartbeat = pb.Heartbeat(stopped=stopped, cpu_seconds=cpu_seconds, gets_on=gets_on)
            yield pb.WorkerMessage(heartbeat=heartbeat)
        case Fetched(job_id, copy):
            yield pb.WorkerMessage(fetched=pb.Fetched(job_id=job_id, copy=_copy_to_proto(copy)))
        case Compiled(job_id, digest, reports, facts, cached, kernels):
            for start in range(0, len(facts), _FACTS_PER_MESSAGE):
                yield _facts_to_proto(job_id, facts[start : start + _FACTS_PER_MESSAGE])
            compiled = pb.CompileDone(
                job_id=job_id, digest=digest, reports=reports, cached=cached, kernels=kernels
            )
            yield pb.WorkerMessage(compiled=compiled)
        case Prepared(job_id):
            yield pb.WorkerMessage(prepared=pb.JobDone(job_id=job_id))
        case Outputs(job_id, step, arrays):
            for chunk in to_chunks(arrays):
                outputs = pb.StepOutputsOf(job_id=job_id, step=step, chunk=chunk)
                yield pb.WorkerMessage(outputs=outputs)
        case Recorded(job_id, timeline):
            for chunk in to_chunks(timeline, compress=True):
                part = pb.TimelineOf(job_id=job_id, chunk=chunk)
                yield pb.WorkerMessage(timeline=part)
        case OperationDone(job_id, ticket):
            done = pb.OperationDone(job_id=job_id, ticket=ticket)
            yield pb.WorkerMessage(operation_done=done)
        case RunFailed(job_id, ticket, error):
            run = pb.RunFailed(job_id=job_id, ticket=ticket, error=report_to_proto(error))
            yield pb.WorkerMessage(run_failed=run)
        case Written(job_id, ticket):
            yield pb.WorkerMessage(written=pb.OperationDone(job_id=job_id, ticket=ticket))
        case Failed(job_id, error):
            failed = pb.JobFailed(job_id=job_id, error=report_to_proto(error))
            yield pb.WorkerMessage(failed=failed)
        case Idle(job_id):
            yield pb.WorkerMessage(idle=pb.JobDone(job_id=job_id))


def _copy_to_proto(copy: LocalCopy | None) -> pb.LocalCopy | None:
    if copy is None:
        return None
    return pb.LocalCopy(process=copy.process, descriptor=copy.descriptor)


def _copy_from_proto(message: pb.Compile | pb.Fetched) -> LocalCopy | None:
    if not message.HasField("copy"):
        return None
    return LocalCopy(message.copy.process, message.copy.descriptor)


def heartbeat_from_proto(heartbeat: pb.Heartbeat) -> Heartbeat:
    """What a worker, or the process beside it, says of it."""
    return Heartbeat(heartbeat.stopped, heartbeat.cpu_seconds, heartbeat.gets_on)


def _facts_to_proto(job_id: int, facts: Sequence[CrossRankFact]) -> pb.WorkerMessage:
    message = pb.Facts(
        job_id=job_id,
        sync_id=[fact.sync_id for fact in facts],
        register=[fact.register for fact in facts],
        name=[fact.name for fact in facts],
        role=[fact.role for fact in facts],
        ranks=[len(fact.ranks) for fact in facts],
        rank=[rank for fact in facts for rank in fact.ranks],
        text=[fact.text for fact in facts],
    )
    return pb.WorkerMessage(facts=message)


class WorkerReader:
    """Reads one worker's stream of protobuf messages."""

    def __init__(self) -> None:
        self._facts: list[CrossRankFact] = []
        self._fact_bytes = 0
        self._outputs = Assembler("a rank's outputs", MAX_ARRAYS_BYTES)
        self._timeline = Assembler("a rank's timeline", MAX_JOB_BYTES)

    def read(self, message: pb.WorkerMessage) -> WorkerMessage | None:
        """The message, None while it is not complete; a WireFormatError where there is none."""
        match message.WhichOneof("message"):
            case "register":
                found = message.register
                rank = None if found.rank < 0 else found.rank
                return Register(
                    rank,
                    found.host,
                    found.device,
                    found.version,
                    found.host_id,
                    found.peer_address,
                    found.network,
                    found.is_loopback,
                    found.deadline,
                )
            case "heartbeat":
                return heartbeat_from_proto(message.heartbeat)
            case "facts":
                self._add_facts(message.facts)
                return None
            case "fetched":
                return Fetched(message.fetched.job_id, _copy_from_proto(message.fetched))
            case "compiled":
                facts, self._facts, self._fact_bytes = tuple(self._facts), [], 0
                done = message.compiled
                return Compiled(
                    done.job_id,
                    done.digest,
                    done.reports,
                    facts,
                    done.cached,
                    done.kernels[:_KERNELS_CHARACTERS],
                )
            case "prepared":
                return Prepared(message.prepared.job_id)
            case "outputs":
                outputs = message.outputs
                arrays = self._outputs.add(outputs.chunk)
                return None if arrays is None else Outputs(outputs.job_id, outputs.step, arrays)
            case "timeline":
                part = message.timeline
                timeline = self._timeline.add(part.chunk)
                return None if timeline is None else Recorded(part.job_id, timeline)
            case "operation_done":
                operation = message.operation_done
                return OperationDone(operation.job_id, operation.ticket)
            case "run_failed":
                run = message.run_failed
                return RunFailed(run.job_id, run.ticket, report_from_proto(run.error))
            case "written":
                return Written(message.written.job_id, message.written.ticket)
            case "failed":
                failed = message.failed
                return Failed(failed.job_id, report_from_proto(failed.error))
            case "idle":
                return Idle(message.idle.job_id)
            case _:
                raise WireFormatError("a worker sent a message that this version does not know")

    def _add_facts(self, message: pb.Facts) -> None:
        self._fact_bytes += message.ByteSize()
        if len(self._facts) + len(message.text) > _MAX_FACTS or self._fact_bytes > _MAX_FACT_BYTES:
            raise WireFormatError(
                "a worker sent too many cross-rank facts",
                got=f"{self._fact_bytes} bytes",
                expected=f"at most {_MAX_FACTS} facts and {_MAX_FACT_BYTES} bytes",
            )
        self._facts += build(
            CrossRankFact,
            message.sync_id[:],
            message.register[:],
            message.name[:],
            message.role[:],
            split(message.rank[:], message.ranks[:]),
            message.text[:],
        )


# --- master to worker -----------------------------------------------------------------------------


def master_message_to_proto(message: MasterMessage) -> pb.MasterMessage:
    """A master's message to a worker."""
    match message:
        case Registered(rank, world_size, silence, token, peer_key):
            registered = pb.Registered(
                rank=rank,
                world_size=world_size,
                silence_seconds=silence,
                token=token,
                peer_key=peer_key,
            )
            return pb.MasterMessage(registered=registered)
        case Refused(error):
            return pb.MasterMessage(refused=report_to_proto(error))
        case Heartbeat():
            return pb.MasterMessage(heartbeat=pb.Heartbeat())
        case Compile(job_id, mode, world_size, cache, digest, share, copy):
            compile_ = pb.Compile(
                job_id=job_id,
                mode=mode,
                world_size=world_size,
                cache=cache,
                digest=digest,
                share=share,
                copy=_copy_to_proto(copy),
            )
            return pb.MasterMessage(compile=compile_)
        case Prepare(job_id, token, restore, far, save, deadline, record, open_, anomaly):
            peers = [pb.PeerAddress(rank=each.rank, address=each.address) for each in far]
            prepare = pb.Prepare(
                job_id=job_id,
                transport_token=token,
                restore=restore,
                far=peers,
                save=save,
                deadline=deadline,
                record=record,
                open=open_,
                anomaly=anomaly,
            )
            return pb.MasterMessage(prepare=prepare)
        case Run(job_id, ticket, steps, fed, feeds):
            run = pb.Run(job_id=job_id, ticket=ticket, steps=steps, fed=fed, feeds=feeds)
            return pb.MasterMessage(run=run)
        case Save():
            order = _save_to_proto(message)
            order.before = message.before
            return pb.MasterMessage(save=order)
        case WriteIndex():
            return pb.MasterMessage(index=_save_to_proto(message))
        case Collect(job_id, ticket, before):
            collect = pb.Collect(job_id=job_id, ticket=ticket, before=before)
            return pb.MasterMessage(collect=collect)
        case SendTimeline(job_id, ticket):
            wanted = pb.OperationDone(job_id=job_id, ticket=ticket)
            return pb.MasterMessage(timeline=wanted)
        case Finish(job_id):
            return pb.MasterMessage(finish=pb.JobDone(job_id=job_id))
        case Abort(job_id, error):
            abort = pb.JobFailed(job_id=job_id, error=report_to_proto(error))
            return pb.MasterMessage(abort=abort)


def _save_to_proto(order: Save | WriteIndex) -> pb.Save:
    return pb.Save(
        job_id=order.job_id,
        ticket=order.ticket,
        directory=order.directory,
        background=order.background,
    )


def master_message_from_proto(message: pb.MasterMessage) -> MasterMessage:
    """The message of a master; a WireFormatError where there is none."""
    match message.WhichOneof("message"):
        case "registered":
            found = message.registered
            return Registered(
                found.rank,
                found.world_size,
                found.silence_seconds,
                found.token,
                found.peer_key,
            )
        case "refused":
            return Refused(report_from_proto(message.refused))
        case "heartbeat":
            return Heartbeat()
        case "compile":
            compile_ = message.compile
            return Compile(
                compile_.job_id,
                compile_.mode,
                compile_.world_size,
                compile_.cache,
                compile_.digest,
                compile_.share,
                _copy_from_proto(compile_),
            )
        case "prepare":
            prepare = message.prepare
            far = tuple(PeerAddress(each.rank, each.address) for each in prepare.far)
            return Prepare(
                prepare.job_id,
                prepare.transport_token,
                prepare.restore,
                far,
                prepare.save,
                prepare.deadline,
                prepare.record,
                prepare.open,
                prepare.anomaly,
            )
        case "run":
            run = message.run
            return Run(run.job_id, run.ticket, run.steps, run.fed, run.feeds)
        case "save":
            save = message.save
            return Save(save.job_id, save.ticket, save.directory, save.background, save.before)
        case "index":
            index = message.index
            return WriteIndex(index.job_id, index.ticket, index.directory, index.background)
        case "collect":
            collect = message.collect
            return Collect(collect.job_id, collect.ticket, collect.before)
        case "timeline":
            return SendTimeline(message.timeline.job_id, message.timeline.ticket)
        case "finish":
            return Finish(message.finish.job_id)
        case "abort":
            return Abort(message.abort.job_id, report_from_proto(message.abort.error))
        case _:
            raise WireFormatError("the master sent a message that this version does not know")


# --- master to client -----------------------------------------------------------------------------


def event_to_protos(event: JobEvent) -> Iterator[pb.JobEvent]:
    """An event of a job as one or more protobuf messages."""
    match event:
        case PhaseChanged(phase, seconds, error):
            change = pb.PhaseChange(phase=phase.value, seconds=seconds)
            if error is not None:
                change.error.CopyFrom(report_to_proto(error))
            yield pb.JobEvent(phase=change)
        case Waiting(missing, count, seconds):
            yield pb.JobEvent(waiting=pb.Waiting(rank=missing, count=count, seconds=seconds))
        case Shipped(ranks, world_size, sent_bytes):
            shipped = pb.Shipped(ranks=ranks, world_size=world_size, sent_bytes=sent_bytes)
            yield pb.JobEvent(shipped=shipped)
        case CompileFinished(digest, seconds, cached):
            compiled = pb.Compiled(digest=digest, seconds=seconds, cached=cached)
            yield pb.JobEvent(compiled=compiled)
        case RankOutputs(step, rank, arrays):
            for chunk in to_chunks(arrays):
                yield pb.JobEvent(outputs=pb.StepOutputs(step=step, rank=rank, chunk=chunk))
        case RankTimeline(rank, timeline):
            for chunk in to_chunks(timeline, compress=True):
                yield pb.JobEvent(timeline=pb.RankTimeline(rank=rank, chunk=chunk))
        case StepDone(step):
            yield pb.JobEvent(step_done=step)
        case TicketDone(ticket):
            yield pb.JobEvent(operation_done=ticket)
        case StepsFailed(ticket, error):
            steps_failed = pb.StepsFailed(ticket=ticket, error=report_to_proto(error))
            yield pb.JobEvent(steps_failed=steps_failed)
        case StepsDropped(count):
            yield pb.JobEvent(dropped_steps=count)


class EventReader:
    """Reads a job's stream of protobuf events."""

    def __init__(self) -> None:
        self._outputs = Assembler("a step's outputs", MAX_ARRAYS_BYTES)
        self._timeline = Assembler("a rank's timeline", MAX_JOB_BYTES)

    def read(self, message: pb.JobEvent) -> JobEvent | None:
        """The event; None while it is not complete or where it only says that all is well."""
        match message.WhichOneof("event"):
            case "phase":
                change = message.phase
                error = report_from_proto(change.error) if change.HasField("error") else None
                return PhaseChanged(_phase(change.phase), change.seconds, error)
            case "waiting":
                waiting = message.waiting
                return Waiting(tuple(waiting.rank), waiting.count, waiting.seconds)
            case "shipped":
                shipped = message.shipped
                return Shipped(shipped.ranks, shipped.world_size, shipped.sent_bytes)
            case "compiled":
                compiled = message.compiled
                return CompileFinished(compiled.digest, compiled.seconds, compiled.cached)
            case "outputs":
                outputs = message.outputs
                arrays = self._outputs.add(outputs.chunk)
                return None if arrays is None else RankOutputs(outputs.step, outputs.rank, arrays)
            case "timeline":
                part = message.timeline
                timeline = self._timeline.add(part.chunk)
                return None if timeline is None else RankTimeline(part.rank, timeline)
            case "step_done":
                return StepDone(message.step_done)
            case "operation_done":
                return TicketDone(message.operation_done)
            case "steps_failed":
                failed = message.steps_failed
                return StepsFailed(failed.ticket, report_from_proto(failed.error))
            case "dropped_steps":
                return StepsDropped(message.dropped_steps)
            case "alive":
                return None
            case _:
                raise WireFormatError("the master sent an event that this version does not know")


def _phase(name: str) -> Phase:
    try:
        return Phase(name)
    except ValueError:
        raise WireFormatError("unknown phase of a job", got=repr(name)) from None


def status_to_proto(status: ClusterStatus) -> pb.StatusReply:
    """A picture of a cluster."""
    workers = [
        pb.WorkerStatus(
            rank=each.rank,
            host=each.host,
            device=each.device,
            version=each.version,
            job_id=each.job_id,
        )
        for each in status.workers
    ]
    jobs = [
        pb.JobStatus(
            job_id=each.job_id,
            name=each.name,
            phase=each.phase.value,
            seconds=each.seconds,
            error=None if each.error is None else report_to_proto(each.error),
            fetched_ranks=each.fetched_ranks,
            sent_bytes=each.sent_bytes,
            queued_seconds=each.queued_seconds,
        )
        for each in status.jobs
    ]
    return pb.StatusReply(
        version=status.version, world_size=status.world_size, workers=workers, jobs=jobs
    )


def status_from_proto(message: pb.StatusReply) -> ClusterStatus:
    """The picture of a cluster in a message."""
    workers = [
        WorkerStatus(each.rank, each.host, each.device, each.version, each.job_id)
        for each in message.workers
    ]
    jobs = [
        JobStatus(
            each.job_id,
            each.name,
            _phase(each.phase),
            each.seconds,
            report_from_proto(each.error) if each.HasField("error") else None,
            each.fetched_ranks,
            each.sent_bytes,
            each.queued_seconds,
        )
        for each in message.jobs
    ]
    return ClusterStatus(message.version, message.world_size, tuple(workers), tuple(jobs))
