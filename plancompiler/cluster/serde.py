"""Which protobuf messages hold the records of `cluster.messages`.

A stream carries one kind of envelope, which holds one record in the field named after its class.
Records that can be large (facts, outputs) become several envelopes; a `Reader` puts them together
again, within bounds.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar, get_args

from google.protobuf.message import Message

from plancompiler.cluster.chunks import (
    CHUNK_BYTES,
    MAX_ARRAYS_BYTES,
    MAX_JOB_BYTES,
    Assembler,
    to_chunks,
)
from plancompiler.cluster.codec import Codec, codec
from plancompiler.cluster.facts import facts_from_bytes, facts_to_bytes
from plancompiler.cluster.messages import (
    JobEvent,
    MasterMessage,
    Outputs,
    RankCompiled,
    RankOutputs,
    RankTimeline,
    TimelineRecorded,
    WorkerMessage,
)
from plancompiler.errors import WireFormatError
from plancompiler.proto import cluster_pb2 as pb

T = TypeVar("T")
P = TypeVar("P")
Sized = TypeVar("Sized", bound=Message)


@dataclasses.dataclass(frozen=True, slots=True)
class _Large:
    """A field that crosses in chunks, which the message names like it."""

    name: str
    what: str
    limit: int
    compress: bool = False
    pack: Callable[[Any], bytes] = bytes
    unpack: Callable[[bytes], Any] = bytes


_LARGE: dict[type, _Large] = {
    Outputs: _Large("arrays", "a rank's outputs", MAX_ARRAYS_BYTES),
    RankOutputs: _Large("arrays", "a step's outputs", MAX_ARRAYS_BYTES),
    TimelineRecorded: _Large("timeline", "a rank's timeline", MAX_JOB_BYTES, compress=True),
    RankTimeline: _Large("timeline", "a rank's timeline", MAX_JOB_BYTES, compress=True),
    RankCompiled: _Large(
        *("facts", "a rank's facts", MAX_JOB_BYTES, True),
        pack=facts_to_bytes,
        unpack=facts_from_bytes,
    ),
}


@dataclasses.dataclass(frozen=True, slots=True)
class _EnvelopeField:
    """Where a record is in its envelope."""

    codec: Codec[Any]
    field: str
    is_bare: bool
    """The field holds what the class's only field does, and no message of it."""
    large: _Large | None


class Envelope(Generic[T, P]):
    """Messages of class `message`, each of which holds one of `records` (a union) in its oneof."""

    def __init__(self, message: type[P], records: Any, whom: str) -> None:
        (oneof,) = message.DESCRIPTOR.oneofs  # type: ignore[attr-defined]  # generated
        self.oneof: str = oneof.name
        self.whom = whom
        self.message = message
        self.places = {cls: _place(cls, oneof) for cls in get_args(records)}
        self.by_field = {place.field: place for place in self.places.values()}

    def write(self, record: T) -> list[P]:
        """A record as one or more envelopes."""
        place = self.places[type(record)]
        large, plain = place.large, place.codec.plain
        if large is None:
            values: Any = plain(record)
            if place.is_bare:
                (values,) = values.values()
            return [self.message(**{place.field: values})]
        data = large.pack(getattr(record, large.name))
        return [
            self.message(**{place.field: plain(record, {large.name: chunk})})
            for chunk in to_chunks(data, compress=large.compress)
        ]


def _place(cls: type[Any], oneof: Any) -> _EnvelopeField:
    name = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
    (field,) = (each for each in oneof.fields if each.name == name)
    names = {each.name for each in dataclasses.fields(cls)}
    message = field.message_type
    is_bare = message is None or not names.issubset(message.fields_by_name)
    return _EnvelopeField(codec(cls), name, is_bare, _LARGE.get(cls))


class Reader(Generic[T, P]):
    """Reads a stream of envelopes."""

    def __init__(self, envelope: Envelope[T, P]) -> None:
        self._oneof, self._whom, self._places = envelope.oneof, envelope.whom, envelope.by_field
        self._parts = {
            place.field: Assembler(place.large.what, place.large.limit)
            for place in envelope.places.values()
            if place.large is not None
        }

    def read(self, message: Any) -> T | None:
        """The record, None while it is not complete; a WireFormatError where there is none."""
        name = message.WhichOneof(self._oneof)
        place = self._places.get(name)
        if place is None:
            raise WireFormatError(f"{self._whom} sent a message that this version does not know")
        part = getattr(message, name)
        if place.is_bare:
            return place.codec.read_bare(part)  # type: ignore[no-any-return]  # one of the envelope's
        if (large := place.large) is None:
            return place.codec.read(part)  # type: ignore[no-any-return]  # one of the envelope's
        data = self._parts[name].add(getattr(part, large.name))
        if data is None:
            return None
        return place.codec.read(part, {large.name: large.unpack(data)})  # type: ignore[no-any-return]  # one of the envelope's


def grouped(messages: Iterable[Sized]) -> Iterator[list[Sized]]:
    """Messages that cross together, as their sizes allow: each of gRPC's own messages wakes several
    threads on either side, which takes as long as a small step.
    """
    group: list[Sized] = []
    nbytes = 0
    for message in messages:
        if nbytes >= CHUNK_BYTES:
            yield group
            group, nbytes = [], 0
        group.append(message)
        nbytes += message.ByteSize()
    if group:
        yield group


WORKER_MESSAGES: Envelope[WorkerMessage, pb.WorkerMessage] = Envelope(
    pb.WorkerMessage, WorkerMessage, "a worker"
)
MASTER_MESSAGES: Envelope[MasterMessage, pb.MasterMessage] = Envelope(
    pb.MasterMessage, MasterMessage, "the master"
)
JOB_EVENTS: Envelope[JobEvent, pb.JobEvent] = Envelope(pb.JobEvent, JobEvent, "the master")
