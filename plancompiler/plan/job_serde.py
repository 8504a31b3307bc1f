"""Jobs as bytes, and back."""

from __future__ import annotations

from plancompiler.errors import UsageError
from plancompiler.ir import Job
from plancompiler.ir.settings import parse_settings
from plancompiler.ir.wire import (
    MessageKind,
    TableReader,
    TableWriter,
    reading,
    seal,
    unseal,
    writing,
)
from plancompiler.ir.wire_ops import read_ops, write_ops
from plancompiler.proto import job_pb2


def job_to_bytes(job: Job) -> bytes:
    """A job as a frame of the wire format. Its passes run where it is compiled: a job after them
    has no wire form.
    """
    if job.pipeline is not None:
        raise UsageError(
            f"job {job.name!r} has been cut into micro-batches and cannot be sent any more",
            hint="send the job as it was traced",
        )
    message = job_pb2.Job()
    with writing(MessageKind.JOB):
        message.name = job.name
        message.seed = job.seed
        message.config = str(job.config)
        tables = TableWriter()
        write_ops(message.ops, tables, job.ops)
        tables.write(message.tables)
    return seal(MessageKind.JOB, message)


def job_from_bytes(data: bytes) -> Job:
    """The job in a frame; anything else is a WireFormatError."""
    message = job_pb2.Job()
    unseal(MessageKind.JOB, data, message)
    with reading(MessageKind.JOB):
        tables = TableReader(message.tables, len(data))
        ops = tuple(read_ops(message.ops, tables))
        return Job(message.name, ops, message.seed, parse_settings(message.config))
