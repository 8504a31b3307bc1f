"""The messages of the cluster as protobuf, chunks, events of a job at the master."""

from __future__ import annotations

import asyncio
import dataclasses
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given
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
    to_chunks,
)
from plancompiler.cluster.serde import (
    EventReader,
    WorkerReader,
    event_to_protos,
    master_message_from_proto,
    master_message_to_proto,
    report_from_proto,
    report_to_proto,
    status_from_proto,
    status_to_proto,
    worker_message_to_protos,
)
from plancompiler.errors import (
    CATALOG,
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

WORKER_MESSAGES: list[m.WorkerMessage] = [
    m.Register(None, "host", "cpu", "1.2"),
    m.Register(1, "host", "cpu", "1.2", "id", "127.0.0.1:7", "network", True, 2.5),
    m.Register(0, "", "cuda:1", ""),
    m.Heartbeat(),
    m.Heartbeat(True, 1.5, True),
    m.Fetched(1),
    m.Fetched(1, m.LocalCopy(1 << 22, 1 << 31)),
    m.Compiled(1, "digest", True, ()),
    m.Compiled(1 << 40, "", False, FACTS),
    m.Compiled(2, "digest", False, (), cached=True),
    m.Compiled(2, "digest", False, (), kernels="NumPy 2, openblas 0.3 with Zen kernels"),
    m.Prepared(2),
    m.Outputs(3, 4, LARGE),
    m.Outputs(3, 4, b""),
    m.Recorded(4, LARGE),
    m.OperationDone(5, 6),
    m.RunFailed(5, 6, FULL),
    m.Written(5, 7),
    m.Failed(7, FULL),
    m.Idle(8),
]
MASTER_MESSAGES: list[m.MasterMessage] = [
    m.Registered(3, 4, 5.5, b"token", b"key"),
    m.Refused(BARE),
    m.Heartbeat(),
    m.Compile(1, "naive", 2),
    m.Compile(1, "naive", 2, cache=False),
    m.Compile(1, "naive", 2, False, b"digest", True, m.LocalCopy(0, 3)),
    m.Prepare(3, "token", "folder"),
    m.Prepare(3, "token", "", (m.PeerAddress(2, "10.0.0.1:7"), m.PeerAddress(5, "[::1]:8"))),
    m.Run(4, 5, 6, True),
    m.Run(4, 5, 6, True, b"feeds"),
    m.Prepare(3, "token", "", save="folder"),
    m.Prepare(3, "token", "", deadline=0.25, record=True),
    m.Prepare(3, "token", "", open=True),
    m.Prepare(3, "token", "", anomaly=True),
    m.Save(7, 8, "folder"),
    m.Save(7, 8, "folder", background=True),
    m.Save(7, 8, "folder", before=True),
    m.WriteIndex(9, 10, "folder"),
    m.WriteIndex(9, 10, "folder", background=True),
    m.Collect(11, 12),
    m.Collect(11, 12, before=True),
    m.SendTimeline(12, 13),
    m.Finish(13),
    m.Abort(14, FULL),
]
EVENTS: list[m.JobEvent] = [
    *(m.PhaseChanged(phase, 1.5) for phase in m.Phase),
    m.PhaseChanged(m.Phase.FAILED, 0.0, FULL),
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
]


def test_every_message_is_in_these_lists() -> None:
    for union, listed in (
        (m.WorkerMessage, WORKER_MESSAGES),
        (m.MasterMessage, MASTER_MESSAGES),
        (m.JobEvent, EVENTS),
    ):
        assert {type(each) for each in listed} == set(union.__args__)


def test_messages_of_workers() -> None:
    reader = WorkerReader()
    for message in WORKER_MESSAGES:
        found = [
            reader.read(pb.WorkerMessage.FromString(proto.SerializeToString()))
            for proto in worker_message_to_protos(message)
        ]
        assert found[:-1] == [None] * (len(found) - 1)
        assert found[-1] == message


def test_messages_of_the_master() -> None:
    for message in MASTER_MESSAGES:
        data = master_message_to_proto(message).SerializeToString()
        assert master_message_from_proto(pb.MasterMessage.FromString(data)) == message


def test_events_of_jobs() -> None:
    reader = EventReader()
    for event in EVENTS:
        found = [
            reader.read(pb.JobEvent.FromString(proto.SerializeToString()))
            for proto in event_to_protos(event)
        ]
        assert found[:-1] == [None] * (len(found) - 1)
        assert found[-1] == event


def test_unknown_messages_are_refused() -> None:
    for read, empty in (
        (WorkerReader().read, pb.WorkerMessage()),
        (master_message_from_proto, pb.MasterMessage()),
        (EventReader().read, pb.JobEvent()),
        (EventReader().read, pb.JobEvent(phase=pb.PhaseChange(phase="flying"))),
    ):
        with pytest.raises(WireFormatError):
            read(empty)


def test_status() -> None:
    status = m.ClusterStatus(
        "1.2",
        3,
        (m.WorkerStatus(0, "host", "cpu", "1.2", 4),),
        (
            m.JobStatus(4, "job", m.Phase.RUNNING, 5.0, None, 3, 1 << 40, 2.5),
            m.JobStatus(5, "job", m.Phase.FAILED, 6.0, FULL),
        ),
    )
    data = status_to_proto(status).SerializeToString()
    assert status_from_proto(pb.StatusReply.FromString(data)) == status


@pytest.mark.parametrize("code", sorted(CATALOG))
def test_every_error_crosses_the_wire(code: str) -> None:
    error = CATALOG[code]("what", op="op", source="f.py:1", rank=0, got="a", expected="b", hint="c")
    data = report_to_proto(error.report).SerializeToString()
    report = report_from_proto(pb.ErrorReport.FromString(data))
    again = PlanCompilerError.from_report(report)
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert report_from_proto(report_to_proto(BARE)) == BARE


def test_an_endless_error_is_cut() -> None:
    report = dataclasses.replace(FULL, what="x" * 1_000_000, got="y" * 1_000_000)
    assert len(report_to_proto(report).SerializeToString()) < 64 << 10


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
    rooms, found = set(), None
    for chunk in to_chunks(data):
        found = assembler.add(chunk)
        rooms.add(budget.held)
    assert found == data
    assert rooms == {4 * CHUNK_BYTES, 20 * CHUNK_BYTES, len(data)}


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
    found = arrays_from_bytes(arrays_to_bytes(arrays))
    assert found.keys() == arrays.keys()
    for name, value in arrays.items():
        np.testing.assert_array_equal(found[name], value)
        assert found[name].dtype == np.asarray(value).dtype.newbyteorder("=")
        assert found[name].shape == np.asarray(value).shape
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


def read_all(channel: JobChannel) -> list[m.JobEvent | None]:
    async def read() -> list[m.JobEvent | None]:
        return [event async for event in channel.read()]

    return asyncio.run(asyncio.wait_for(read(), SECONDS))


def test_every_reader_gets_all_events() -> None:
    channel = JobChannel(Job("j", ()), m.JobRequest(1))
    for event in EVENTS:
        if not isinstance(event, m.PhaseChanged | m.Waiting):
            channel.publish(event)
    channel.publish(m.PhaseChanged(m.Phase.FINISHED, 1.0))
    expected = [event for event in EVENTS if not isinstance(event, m.PhaseChanged | m.Waiting)]
    for _ in range(2):
        assert read_all(channel)[:-1] == expected
    assert channel.readers == 0


def test_of_what_is_missing_readers_get_the_latest() -> None:
    queued, compiling = (
        m.PhaseChanged(phase, 0.0) for phase in (m.Phase.QUEUED, m.Phase.COMPILING)
    )
    missing = [m.Waiting((rank,), 1, float(rank)) for rank in range(4)]

    async def follow() -> list[m.JobEvent | None]:
        channel = JobChannel(Job("j", ()), m.JobRequest(1))
        channel.publish(queued)
        channel.publish(missing[0])
        channel.publish(missing[1])
        events = channel.read()
        found = [await anext(events), await anext(events)]
        channel.publish(missing[2])
        found.append(await anext(events))
        channel.publish(missing[3])
        channel.publish(compiling)
        found.append(await anext(events))
        waiting = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        channel.wake()
        return [*found, await waiting]

    found = asyncio.run(asyncio.wait_for(follow(), SECONDS))
    assert found == [queued, missing[1], missing[2], compiling, None]


def test_a_slow_reader_misses_the_oldest_steps_and_is_told() -> None:
    channel = JobChannel(Job("j", ()), m.JobRequest(9), event_bytes=10_000)
    for step in range(5, 25):
        for rank in range(2):
            channel.publish(m.RankOutputs(step, rank, bytes(1000)))
        channel.publish(m.StepDone(step))
    channel.publish(m.PhaseChanged(m.Phase.FINISHED, 1.0))
    found = read_all(channel)
    assert isinstance(found[0], m.StepsDropped)
    first = 5 + found[0].count
    kept = [event for event in found if isinstance(event, m.RankOutputs)]
    assert [event.step for event in kept] == [step for step in range(first, 25) for _ in range(2)]
    assert [event.step for event in found if isinstance(event, m.StepDone)] == list(
        range(first, 25)
    )
    assert 0 < len(kept) * 1000 <= 10_000
    channel.forget_outputs()
    assert read_all(channel) == [m.StepsDropped(20), m.PhaseChanged(m.Phase.FINISHED, 1.0)]


def test_timelines_are_kept_as_long_as_outputs() -> None:
    channel = JobChannel(Job("j", ()), m.JobRequest(1, record=True))
    channel.publish(m.RankTimeline(0, b"times"))
    end = m.PhaseChanged(m.Phase.FINISHED, 1.0)
    channel.publish(end)
    assert read_all(channel) == [m.RankTimeline(0, b"times"), end]
    channel.forget_outputs()
    assert read_all(channel) == [end]


def test_the_latest_step_is_kept_however_large() -> None:
    channel = JobChannel(Job("j", ()), m.JobRequest(9), event_bytes=10)
    channel.publish(m.RankOutputs(0, 0, bytes(1000)))
    channel.publish(m.StepDone(0))
    channel.publish(m.PhaseChanged(m.Phase.FINISHED, 1.0))
    assert [type(event) for event in read_all(channel)] == [
        m.RankOutputs, m.StepDone, m.PhaseChanged,
    ]  # fmt: skip


def test_addresses() -> None:
    assert split_address("[::1]:80") == ("::1", 80)
    assert split_address("localhost:0") == ("localhost", 0)
    assert is_loopback("127.3.2.1")
    assert is_loopback("::1")
    assert is_loopback("localhost")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("::")
    assert not is_loopback("example.org")
