"""The messages of the cluster as protobuf, chunks, events of a job at the master."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import tracemalloc
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from plancompiler.cluster import messages as m
from plancompiler.cluster.address import is_loopback, split_address
from plancompiler.cluster.chunks import (
    CHUNK_BYTES,
    Assembler,
    Reservation,
    UploadBudget,
    arrays_from_bytes,
    arrays_to_bytes,
    from_chunks,
    pack,
    to_chunks,
)
from plancompiler.cluster.codec import decode, encode
from plancompiler.cluster.serde import (
    JOB_EVENTS,
    MASTER_MESSAGES,
    WORKER_MESSAGES,
    Envelope,
    Reader,
)
from plancompiler.errors import (
    CATALOG,
    ClusterError,
    ErrorReport,
    LimitError,
    PlanCompilerError,
    WireFormatError,
)
from plancompiler.ir import DType, Job
from plancompiler.master.job_channel import JobChannel
from plancompiler.plan.digest import CrossRankFact
from plancompiler.proto import cluster_pb2 as pb

SECONDS = 60.0
BARE = ErrorReport("E190", "it broke")
FULL = ErrorReport("E190", "it broke", "op", "file.py:3", 7, "this", "that", "do so")
LARGE = bytes(np.random.default_rng(0).bytes(2 * CHUNK_BYTES + 5))
FACTS = tuple(
    CrossRankFact(
        -1 if index % 2 else 1 << 60, index, f"v{index}", "member", tuple(range(index % 4)), "text"
    )
    for index in range(3000)
)

ENVELOPES: tuple[Envelope[Any, Any], ...] = (WORKER_MESSAGES, MASTER_MESSAGES, JOB_EVENTS)
ROOTS: tuple[tuple[type, Any], ...] = (
    (m.RankLine, pb.RankLine),
    (m.ClusterStatus, pb.ClusterStatus),
    (m.JobRequest, pb.SubmitHeader),
    (ErrorReport, pb.ErrorReport),
)
"""Records that cross without an envelope, and their messages."""
EVENTS: list[m.JobEvent] = [
    *(m.PhaseChanged(phase, 1.5) for phase in m.JobPhase),
    m.PhaseChanged(m.JobPhase.FAILED, 0.0, FULL),
    m.Waiting((1, 3), 2, 5.5),
    m.CompileFinished("digest", 2.5),
    m.CompileFinished("digest", 0.5, cached=True),
    m.Shipped(3, 4, 1 << 40),
    m.RankOutputs(3, 4, LARGE),
    m.RankTimeline(4, LARGE),
    m.StepDone(5),
    m.TicketDone(6),
    m.StepsFailed(6, FULL),
    m.StepsDropped(7),
    m.StepsSkipped(3),
]
LARGE_RECORDS: list[tuple[Envelope[Any, Any], Any]] = [
    (WORKER_MESSAGES, m.Outputs(3, 4, LARGE)),
    (WORKER_MESSAGES, m.TimelineRecorded(4, LARGE)),
    (WORKER_MESSAGES, m.RankCompiled(1 << 40, "", False, FACTS)),
    *((JOB_EVENTS, event) for event in EVENTS),
]


# --- every message, whatever it holds -------------------------------------------------------------


def integers(field: Any) -> st.SearchStrategy[int]:
    """What an integer field of a message can hold."""
    bits = 32 if field.type in (field.TYPE_UINT32, field.TYPE_SINT32) else 64
    if field.type in (field.TYPE_SINT32, field.TYPE_SINT64):
        return st.integers(-(1 << bits - 1), (1 << bits - 1) - 1)
    return st.integers(0, (1 << bits) - 1)


def values(hint: Any, field: Any) -> st.SearchStrategy[Any]:
    """Values of this annotation that the field can hold."""
    if isinstance(hint, UnionType):
        return st.none() | values(get_args(hint)[0], field)
    if get_origin(hint) is tuple:
        return st.lists(values(get_args(hint)[0], field), max_size=3).map(tuple)
    if hint is CrossRankFact:  # in columns, which have no message of their own
        return st.sampled_from(FACTS)
    if dataclasses.is_dataclass(hint):
        return records(hint, field.message_type)
    if isinstance(hint, enum.EnumType):
        return st.sampled_from(list(hint))
    plain: dict[Any, st.SearchStrategy[Any]] = {
        bool: st.booleans(),
        bytes: st.binary(max_size=20),
        float: st.floats(allow_nan=False),
        str: st.text(max_size=20),
    }
    return integers(field) if hint is int else plain[hint]


def records(cls: Any, descriptor: Any) -> st.SearchStrategy[Any]:
    """Records of a class that a message can hold."""
    fields = descriptor.fields_by_name
    return st.builds(
        cls, **{name: values(hint, fields[name]) for name, hint in get_type_hints(cls).items()}
    )


def enveloped(envelope: Envelope[Any, Any], cls: type) -> st.SearchStrategy[Any]:
    """Records of a class of an envelope."""
    place = envelope.places[cls]
    field = envelope.message.DESCRIPTOR.fields_by_name[place.field]
    if not place.is_bare:
        return records(cls, field.message_type)
    ((_, hint),) = get_type_hints(cls).items()
    return st.builds(cls, values(hint, field))


CROSSINGS = [
    pytest.param(envelope, cls, id=f"{envelope.message.__name__}-{cls.__name__}")
    for envelope in ENVELOPES
    for cls in envelope.places
]


@pytest.mark.slow
@pytest.mark.parametrize(("envelope", "cls"), CROSSINGS)
@given(data=st.data())
@settings(max_examples=15)
def test_every_message_crosses(envelope: Envelope[Any, Any], cls: type, data: Any) -> None:
    record = data.draw(enveloped(envelope, cls))
    assert crossed(envelope, record) == record


@pytest.mark.parametrize(("cls", "message"), ROOTS)
@given(data=st.data())
@settings(max_examples=15)
def test_every_record_without_an_envelope_crosses(cls: type, message: Any, data: Any) -> None:
    record = data.draw(records(cls, message.DESCRIPTOR))
    whole = message.FromString(encode(message, record).SerializeToString())
    assert decode(cls, whole) == record


def test_no_message_is_forgotten() -> None:
    """Every class has a message, every message a class, and both have the same fields."""
    seen: set[Any] = set()

    def see(hint: Any, descriptor: Any, others: set[str]) -> None:
        for inner in get_args(hint):
            see(inner, descriptor, others)
        if not dataclasses.is_dataclass(hint):
            return
        seen.add(hint)
        if hint is CrossRankFact:
            return
        names = get_type_hints(hint)
        assert {*names} == {*descriptor.fields_by_name} - others
        for name, inner in names.items():
            see(inner, descriptor.fields_by_name[name].message_type, set())

    for cls, message in ROOTS:
        see(cls, message.DESCRIPTOR, {"check", "version"} - get_type_hints(cls).keys())
    for envelope in ENVELOPES:
        descriptor = envelope.message.DESCRIPTOR
        for cls, place in envelope.places.items():
            seen.add(cls)
            if not place.is_bare:
                part = descriptor.fields_by_name[place.field].message_type
                see(cls, part, {"before"} if cls is m.WriteIndex else set())
        (oneof,) = descriptor.oneofs
        assert {each.name for each in oneof.fields} == {*envelope.by_field}
    mine = (each for each in vars(m).values() if getattr(each, "__module__", "") == m.__name__)
    assert {each for each in mine if dataclasses.is_dataclass(each)} <= seen


def crossed(envelope: Envelope[Any, Any], record: Any) -> Any:
    """What a reader makes of a record, once all of it has come."""
    reader = Reader(envelope)
    read = [
        reader.read(envelope.message.FromString(proto.SerializeToString()))
        for proto in envelope.write(record)
    ]
    assert read[:-1] == [None] * (len(read) - 1)
    return read[-1]


def test_large_messages_cross_in_parts() -> None:
    for envelope, record in LARGE_RECORDS:
        assert crossed(envelope, record) == record


def test_unknown_messages_are_refused() -> None:
    not_facts = to_chunks(b"no facts")[0]
    uneven = to_chunks(pb.Facts(name=["v"]).SerializeToString())[0]
    for envelope, message in (
        (WORKER_MESSAGES, pb.WorkerMessage()),
        (MASTER_MESSAGES, pb.MasterMessage()),
        (JOB_EVENTS, pb.JobEvent()),
        (JOB_EVENTS, pb.JobEvent(phase_changed=pb.PhaseChanged(phase="flying"))),
        (WORKER_MESSAGES, pb.WorkerMessage(failed=pb.JobFailed(job_id=1))),
        (WORKER_MESSAGES, pb.WorkerMessage(rank_compiled=pb.RankCompiled(facts=not_facts))),
        (WORKER_MESSAGES, pb.WorkerMessage(rank_compiled=pb.RankCompiled(facts=uneven))),
    ):
        with pytest.raises(WireFormatError):
            Reader(envelope).read(message)


@pytest.mark.parametrize("code", sorted(CATALOG))
def test_every_error_crosses_the_wire(code: str) -> None:
    error = CATALOG[code]("what", op="op", source="f.py:1", rank=0, got="a", expected="b", hint="c")
    data = encode(pb.ErrorReport, error.report).SerializeToString()
    report = decode(ErrorReport, pb.ErrorReport.FromString(data))
    again = PlanCompilerError.from_report(report)
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert decode(ErrorReport, encode(pb.ErrorReport, BARE)) == BARE


def test_an_endless_error_is_cut() -> None:
    report = dataclasses.replace(FULL, what="x" * 1_000_000, got="y" * 1_000_000)
    assert len(encode(pb.ErrorReport, report).SerializeToString()) < 64 << 10
    uncut = pb.ErrorReport(what="x" * 1_000_000)
    assert len(decode(ErrorReport, uncut).what) < 64 << 10


# --- chunks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 << 20])
@pytest.mark.parametrize("compress", [False, True])
def test_chunks(size: int, compress: bool) -> None:
    for data in (bytes(size), (LARGE * 2)[:size]):
        chunks = to_chunks(data, compress=compress)
        assert all(len(chunk.data) <= CHUNK_BYTES for chunk in chunks)
        assert from_chunks(chunks, "it", 4 << 20) == data
    assert len(to_chunks(bytes(3 << 20), compress=True)) == 1


def test_chunks_that_lie_are_refused_before_memory_is_taken() -> None:
    packed = to_chunks(bytes(2 << 20), compress=True)[0]
    for wrong in (
        pb.Chunk(data=b"x", wire_bytes=1 << 40, raw_bytes=1),
        pb.Chunk(data=b"x", wire_bytes=1, raw_bytes=1 << 40),
        pb.Chunk(data=b"xx", wire_bytes=1, raw_bytes=1),
        pb.Chunk(data=b"x", wire_bytes=1, raw_bytes=2),
        pb.Chunk(data=b"", wire_bytes=1, raw_bytes=1),
        pb.Chunk(data=b"x", wire_bytes=1, raw_bytes=1, compression=1),
        # Says that it unpacks to less than it does.
        pb.Chunk(data=packed.data, wire_bytes=packed.wire_bytes, raw_bytes=10, compression=1),
    ):
        with pytest.raises(WireFormatError):
            Assembler("it", 1 << 20).add(wrong)
    for stream in ([], to_chunks(LARGE)[:-1], [*to_chunks(b"a"), *to_chunks(b"b")]):
        with pytest.raises(WireFormatError):
            from_chunks(stream, "it", 16 << 20)


def test_memory_grows_with_what_has_come_and_not_with_what_is_announced() -> None:
    raw = 256 << 20
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(raw))
    announced = pb.Chunk(data=bomb, wire_bytes=len(bomb), raw_bytes=raw, compression=1)
    never_sent = pb.Chunk(data=b"x", wire_bytes=raw, raw_bytes=raw)
    budget = UploadBudget(3 * CHUNK_BYTES)
    tracemalloc.start()
    try:
        with pytest.raises(WireFormatError, match="unpacks to more"):
            Assembler("it", raw, Reservation(budget)).add(announced)
        held = Reservation(budget)
        assert Assembler("it", raw, held).add(never_sent) is None
        assert 1 <= budget.held <= 4  # the room that was made is what counts
        held.close()
        held.take(10)  # of whoever still unpacks
        assert budget.held == 0
        assert tracemalloc.get_traced_memory()[1] < 4 * CHUNK_BYTES
    finally:
        tracemalloc.stop()
    # What would be packed too tightly is sent as it is.
    tight = to_chunks(bytes(8 << 20), compress=True)
    assert from_chunks(tight, "it", 16 << 20) == bytes(8 << 20)
    assert sum(len(chunk.data) for chunk in tight) == 8 << 20


def test_what_arrived_is_moved_a_few_times_and_not_with_each_chunk() -> None:
    data = (LARGE * 20)[: 20 * CHUNK_BYTES + 5]
    budget = UploadBudget(len(data))
    assembler = Assembler("it", len(data), Reservation(budget))
    held, actual = set(), None
    for chunk in to_chunks(data):
        actual = assembler.add(chunk)
        held.add(budget.held)
    assert actual == data
    assert held == {4 * CHUNK_BYTES, 20 * CHUNK_BYTES, len(data)}


def test_all_uploads_together_have_a_budget() -> None:
    budget = UploadBudget(3 * CHUNK_BYTES)
    packed = to_chunks(bytes(2 * CHUNK_BYTES), compress=True)
    first, second = Reservation(budget), Reservation(budget)
    assert Assembler("it", len(LARGE), first).add(packed[0]) == bytes(2 * CHUNK_BYTES)
    assert budget.held == 2 * CHUNK_BYTES + len(packed[0].data)
    with pytest.raises(LimitError, match="--max-upload-bytes"):
        Assembler("it", len(LARGE), second).add(packed[0])
    first.keep(10)
    second.close()
    assert budget.held == 10
    first.close()
    assert budget.held == 0


@given(
    data=st.lists(st.binary(max_size=20), max_size=4), sizes=st.tuples(*[st.integers(0, 50)] * 2)
)
def test_random_chunks_never_do_harm(data: list[bytes], sizes: tuple[int, int]) -> None:
    chunks = [pb.Chunk(data=each) for each in data]
    if chunks:
        chunks[0].wire_bytes, chunks[0].raw_bytes = sizes
    try:
        from_chunks(chunks, "it", 40)
    except WireFormatError:
        return
    assert sizes[0] == sum(map(len, data))


def test_arrays() -> None:
    arrays = {str(dtype): np.ones((2, 3), dtype.numpy) for dtype in DType}
    arrays["scalar"] = np.float32(3)  # type: ignore[assignment]
    arrays["empty"] = np.zeros((0, 2))
    arrays["strided"] = np.arange(20).reshape(4, 5)[::2, 1:].T
    arrays["swapped"] = np.arange(3, dtype=">i4")
    actual = arrays_from_bytes(arrays_to_bytes(arrays))
    assert actual.keys() == arrays.keys()
    for name, value in arrays.items():
        np.testing.assert_array_equal(actual[name], value)
        assert actual[name].dtype == np.asarray(value).dtype.newbyteorder("=")
        assert actual[name].shape == np.asarray(value).shape
    with pytest.raises(WireFormatError):
        arrays_to_bytes({"x": np.array(["text"])})


@given(data=st.binary(max_size=100))
def test_random_bytes_are_no_arrays(data: bytes) -> None:
    with pytest.raises(WireFormatError):
        arrays_from_bytes(data + b"\xff")


@given(cut=st.integers(1, 100))
def test_cut_arrays_are_refused(cut: int) -> None:
    data = arrays_to_bytes({"x": np.ones(5)})
    with pytest.raises(WireFormatError):
        arrays_from_bytes(data[:-cut])


# --- a job's events at the master -----------------------------------------------------------------


def read_all(channel: JobChannel, since: int = 0) -> list[m.JobEvent]:
    async def read() -> list[m.JobEvent]:
        return [event async for events in channel.read(since) for event in events]

    return asyncio.run(asyncio.wait_for(read(), SECONDS))


def test_every_reader_gets_all_events() -> None:
    channel = JobChannel(Job("j", ()), m.JobRequest(1))
    for event in EVENTS:
        if not isinstance(event, m.PhaseChanged | m.Waiting):
            channel.publish(event)
    channel.publish(m.PhaseChanged(m.JobPhase.FINISHED, 1.0))
    expected = [event for event in EVENTS if not isinstance(event, m.PhaseChanged | m.Waiting)]
    for _ in range(2):
        assert read_all(channel)[:-1] == expected
    assert channel.readers == 0


def test_of_what_is_missing_readers_get_the_latest() -> None:
    queued, compiling = (
        m.PhaseChanged(phase, 0.0) for phase in (m.JobPhase.QUEUED, m.JobPhase.COMPILING)
    )
    missing = [m.Waiting((rank,), 1, float(rank)) for rank in range(4)]

    async def follow() -> list[list[m.JobEvent]]:
        channel = JobChannel(Job("j", ()), m.JobRequest(1))
        channel.publish(queued)
        channel.publish(missing[0])
        channel.publish(missing[1])
        events = channel.read()
        results = [await anext(events)]
        channel.publish(missing[2])
        results.append(await anext(events))
        channel.publish(missing[3])
        channel.publish(compiling)
        results.append(await anext(events))
        waiting = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        channel.wake()
        return [*results, await waiting]

    actual = asyncio.run(asyncio.wait_for(follow(), SECONDS))
    assert actual == [[queued, missing[1]], [missing[2]], [compiling], []]


def test_a_slow_reader_misses_the_oldest_steps_and_is_told() -> None:
    channel = JobChannel(Job("j", ()), m.JobRequest(9), event_bytes=10_000)
    for step in range(5, 25):
        for rank in range(2):
            channel.publish(m.RankOutputs(step, rank, bytes(1000)))
        channel.publish(m.StepDone(step))
    channel.publish(m.PhaseChanged(m.JobPhase.FINISHED, 1.0))
    actual = read_all(channel)
    assert isinstance(actual[0], m.StepsDropped)
    first = 5 + actual[0].count
    kept = [event for event in actual if isinstance(event, m.RankOutputs)]
    assert [event.step for event in kept] == [step for step in range(first, 25) for _ in range(2)]
    assert [event.step for event in actual if isinstance(event, m.StepDone)] == list(
        range(first, 25)
    )
    assert 0 < len(kept) * 1000 <= 10_000
    channel.forget_outputs()
    assert read_all(channel) == [m.StepsDropped(20), m.PhaseChanged(m.JobPhase.FINISHED, 1.0)]


@pytest.mark.parametrize("kept", [1 << 20, 9_000])
@pytest.mark.parametrize("since", [0, 5, 6, 17, 24, 25, 99])
def test_a_reader_hears_of_the_steps_that_it_asks_for_and_of_all_others_how_many(
    since: int, kept: int
) -> None:
    channel = JobChannel(Job("j", ()), m.JobRequest(20), event_bytes=kept)
    for step in range(5, 25):
        channel.publish(m.RankOutputs(step, 0, bytes(1000)))
        if step > 5:  # the second rank is a step behind
            channel.publish(m.RankOutputs(step - 1, 1, bytes(1000)))
            channel.publish(m.StepDone(step - 1))
    channel.publish(m.RankOutputs(24, 1, bytes(1000)))
    channel.publish(m.StepDone(24))
    channel.publish(m.PhaseChanged(m.JobPhase.FINISHED, 1.0))
    events = read_all(channel, since)
    assert isinstance(events[-1], m.PhaseChanged)
    done = [event.step for event in events if isinstance(event, m.StepDone)]
    skipped = sum(event.count for event in events if isinstance(event, m.StepsSkipped))
    dropped = sum(event.count for event in events if isinstance(event, m.StepsDropped))
    assert skipped == min(20, max(0, since - 5))
    assert skipped + dropped + len(done) == 20
    assert done == list(range(25 - len(done), 25))
    if kept > 100_000:
        assert not dropped
    assert all(event.step >= since for event in events if isinstance(event, m.RankOutputs))


def test_plans_are_kept_apart_from_outputs() -> None:
    channel = JobChannel(Job("j", ()), m.JobRequest(1), data=bytes(100))
    shared = pack(bytes(50))
    channel.parcels = {0: shared, 1: shared, 2: pack(bytes(30))}
    assert (channel.held_bytes, channel.plan_bytes) == (0, 180)
    channel.publish(m.CompileFinished("digest", 1.0))
    channel.publish(m.RankOutputs(0, 0, bytes(1000)))
    channel.release()
    channel.forget_outputs()
    assert channel.plan_bytes == 180
    channel.forget_plans()
    assert (channel.held_bytes, channel.plan_bytes) == (0, 0)
    channel = JobChannel(Job("j", ()), m.JobRequest(1), data=bytes(100))
    channel.release()  # a job that was never compiled has no plans
    assert channel.plan_bytes == 0


def test_timelines_are_kept_as_long_as_outputs() -> None:
    channel = JobChannel(Job("j", ()), m.JobRequest(1, record=True))
    channel.publish(m.RankTimeline(0, b"times"))
    end = m.PhaseChanged(m.JobPhase.FINISHED, 1.0)
    channel.publish(end)
    assert read_all(channel) == [m.RankTimeline(0, b"times"), end]
    channel.forget_outputs()
    assert read_all(channel) == [end]


def test_the_latest_step_is_kept_however_large() -> None:
    channel = JobChannel(Job("j", ()), m.JobRequest(9), event_bytes=10)
    channel.publish(m.RankOutputs(0, 0, bytes(1000)))
    channel.publish(m.StepDone(0))
    channel.publish(m.PhaseChanged(m.JobPhase.FINISHED, 1.0))
    assert [type(event) for event in read_all(channel)] == [
        m.RankOutputs, m.StepDone, m.PhaseChanged,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "address",
    ["127.0�1:1", "a..b:1", "x" * 64 + ":1", ":1", "host", "host:", "host:٣", "host:65536"],
)
def test_what_cannot_be_an_address_is_refused(address: str) -> None:
    with pytest.raises(ClusterError, match="not an address"):
        split_address(address)


def test_addresses() -> None:
    assert split_address("[::1]:80") == ("::1", 80)
    assert split_address("localhost:0") == ("localhost", 0)
    assert is_loopback("127.3.2.1")
    assert is_loopback("::1")
    assert is_loopback("localhost")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("::")
    assert not is_loopback("example.org")
