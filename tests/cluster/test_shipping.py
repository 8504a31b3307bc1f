"""Parcels and hostile chunks, who fetches a slice from where, copies on a host."""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from plancompiler.cluster import messages as m
from plancompiler.cluster.chunks import (
    CHUNK_BYTES,
    MAX_JOB_BYTES,
    Assembler,
    Parcel,
    digest_of,
    from_chunks,
    pack,
    to_chunks,
)
from plancompiler.errors import (
    WireFormatError,
)
from plancompiler.master.shipping import Delivery, Shipping
from plancompiler.proto import cluster_pb2 as pb
from plancompiler.worker.local_copy import OfferedCopy, read_copy
from tests.cluster.simulated import SimulatedCluster

LARGE = random.Random(0).randbytes(5 * CHUNK_BYTES + 7)
ZSTD = pb.COMPRESSION_ZSTD


# --- parcels --------------------------------------------------------------------------------------


def assembled(parcel: Parcel, offsets: list[int]) -> bytes | None:
    """A parcel received in pieces: the stream breaks when this many bytes have come."""
    assembler = Assembler("it", 1 << 26)
    for end in [*offsets, 1 << 62]:
        assembler.resume()
        for message in parcel.messages_from(assembler.received):
            data = assembler.add_message(message)
            if data is not None:
                return data
            if assembler.received >= end:
                break
    return None


@pytest.mark.parametrize("size", [0, 1, 20_000, CHUNK_BYTES, len(LARGE)])
@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("checked", [False, True])
def test_parcels_arrive_however_often_they_break(size: int, compress: bool, checked: bool) -> None:
    for data in (LARGE[:size], bytes(size)):
        parcel = pack(data, compress=compress, checked=checked)
        assert parcel.digest == (digest_of(data) if checked else b"")
        assert assembled(parcel, []) == data
        assert assembled(parcel, [1, 1, CHUNK_BYTES + 1, 3 * CHUNK_BYTES]) == data
        assert max(map(len, parcel.messages)) < CHUNK_BYTES + 100


def test_a_parcel_goes_on_from_any_offset() -> None:
    parcel = pack(LARGE, checked=True)
    for offset in (1, CHUNK_BYTES - 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 1, len(LARGE)):
        chunks = [pb.Chunk.FromString(each) for each in parcel.messages_from(offset)]
        assert b"".join(chunk.data for chunk in chunks) == LARGE[offset:]
        assert (chunks[0].wire_bytes, chunks[0].digest) == (len(LARGE), parcel.digest)
    with pytest.raises(WireFormatError, match="beyond its end"):
        list(parcel.messages_from(len(LARGE) + 1))


def test_what_goes_on_must_be_what_began() -> None:
    for other in (
        pack(LARGE[::-1], checked=True),
        pack(LARGE[:-1]),
        pack(bytes(len(LARGE)), compress=True, checked=True),
    ):
        assembler = Assembler("it", 1 << 26)
        assembler.add_message(pack(LARGE, checked=True).messages[0])
        assembler.resume()
        with pytest.raises(WireFormatError, match="something else"):
            assembler.add_message(other.messages[0])


def test_bytes_must_have_the_digest_that_was_announced() -> None:
    chunks = to_chunks(LARGE, digest=digest_of(LARGE[1:]))
    with pytest.raises(WireFormatError, match="digest"):
        from_chunks(chunks, "it", 1 << 26)


def test_small_and_random_bytes_are_not_compressed() -> None:
    assert pack(bytes(1000), compress=True).wire_bytes == 1000
    assert pack(LARGE, compress=True).wire_bytes == len(LARGE)
    assert pack(bytes(1 << 20), compress=True).wire_bytes < 1000


def packed(data: bytes, **announced: int) -> pb.Chunk:
    """One chunk of compressed bytes, with what it announces changed."""
    sizes = {"wire_bytes": len(data), "raw_bytes": 1000, "compression": ZSTD} | announced
    return pb.Chunk(data=data, **sizes)


def test_hostile_frames_are_refused_by_what_they_announce() -> None:
    frame = zstandard.ZstdCompressor().compress(bytes(1000))
    bomb = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    assert len(bomb) < 8 << 10
    nameless = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1000))
    skippable = b"\x50\x2a\x4d\x18" + (1000).to_bytes(4, "little") + bytes(1000)
    # Says that it holds 1000 bytes, and goes on for 64 MiB: the size is in the frame's header.
    header = zstandard.frame_header_size(frame)
    forged = frame[:header] + bomb[zstandard.frame_header_size(bomb) :]
    assert zstandard.frame_content_size(forged) == 1000
    assert from_chunks([packed(frame)], "it", 1000) == bytes(1000)
    for chunk, said in (
        (packed(bomb), "unpack to the size"),
        (packed(bomb, raw_bytes=64 << 20), "too large"),
        (packed(forged), "decompress"),
        (packed(nameless), "unpack to the size"),
        (packed(skippable), "decompress"),
        (packed(skippable, raw_bytes=0), "unpack to the size"),
        (packed(frame + frame), "decompress"),
        (packed(frame, raw_bytes=999), "unpack to the size"),
        (packed(frame[:-1]), "decompress"),
        (packed(b"", raw_bytes=0), "decompress"),
        (packed(frame, compression=2), "does not know"),
    ):
        with pytest.raises(WireFormatError, match=said):
            from_chunks([chunk], "it", 8 << 10)


@given(data=st.data())
def test_damaged_frames_give_the_right_bytes_or_an_error(data: st.DataObject) -> None:
    raw = bytes(range(256)) * 100
    frame = bytearray(zstandard.ZstdCompressor(write_checksum=True).compress(raw))
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(0, len(frame) - 1))] ^= data.draw(st.integers(1, 255))
    cut = bytes(frame[: data.draw(st.integers(0, len(frame)))])
    for wire in (bytes(frame), cut):
        chunk = packed(wire, raw_bytes=len(raw))
        chunk.digest = digest_of(raw)
        try:
            actual = from_chunks([chunk], "it", len(raw))
        except WireFormatError:
            continue
        assert actual == raw


@given(messages=st.lists(st.binary(max_size=40), max_size=5))
def test_random_messages_never_do_harm(messages: list[bytes]) -> None:
    assembler = Assembler("it", 64)
    for message in messages:
        try:
            data = assembler.add_message(message)
        except WireFormatError:
            return
        assert data is None or len(data) <= 64


@given(data=st.binary(max_size=300), other=st.booleans())
def test_chunks_are_read_alike_with_and_without_protobuf(data: bytes, other: bool) -> None:
    first = to_chunks(bytes(1000))[0]
    first.data = b"x"
    second = pb.Chunk(data=data, raw_bytes=7 if other else 0)
    received = []
    for add, messages in (
        (Assembler.add, [first, second]),
        (Assembler.add_message, [each.SerializeToString() for each in (first, second)]),
    ):
        assembler = Assembler("it", 1000)
        try:
            for message in messages:
                add(assembler, message)  # type: ignore[operator]
            received.append(assembler.received)
        except WireFormatError:
            received.append(-1)
    assert received[0] == received[1] == (1 + len(data) if data else -1)


def test_tiny_chunks_cost_no_more_memory_than_they_announce() -> None:
    count = 50_000
    assembler = Assembler("it", count)
    assembler.add(pb.Chunk(data=b"x", wire_bytes=count, raw_bytes=count))
    tiny = pb.Chunk(data=b"x")
    results = [assembler.add(tiny) for _ in range(count - 1)]
    assert results[-1] == b"x" * count
    assert set(results[:-1]) == {None}


# --- who fetches from where -----------------------------------------------------------------------

HERE = m.LocalCopy(1, 2)


def test_the_first_rank_of_a_host_fetches_for_the_others() -> None:
    hosts = {0: "a", 1: "a", 2: "a", 3: "b", 4: "b", 5: "b"}
    digests = {0: b"x", 1: b"x", 2: b"y", 3: b"x", 4: b"x", 5: b"x"}
    shipping = Shipping(digests, hosts)
    assert shipping.first() == [
        Delivery(0, b"x", True, None),
        Delivery(2, b"y", False, None),
        Delivery(3, b"x", True, None),
    ]
    assert shipping.arrived(3)
    assert shipping.after(3, HERE) == [
        Delivery(4, b"x", False, HERE),
        Delivery(5, b"x", False, HERE),
    ]
    assert not shipping.arrived(3)
    assert shipping.after(3, HERE) == []
    assert shipping.arrived(0)
    # One that cannot share sends the others to the master.
    assert shipping.after(0, None) == [Delivery(1, b"x", False, None)]
    assert shipping.arrived(2)
    assert shipping.after(2, None) == []
    assert shipping.fetched == 3


@given(
    needs=st.lists(st.tuples(st.sampled_from("abc"), st.binary(max_size=1)), min_size=1),
    seed=st.integers(),
)
def test_every_rank_is_told_once_and_each_host_fetches_once(
    needs: list[tuple[str, bytes]], seed: int
) -> None:
    choose = random.Random(seed)
    shipping = Shipping(
        {rank: digest for rank, (_, digest) in enumerate(needs)},
        {rank: host for rank, (host, _) in enumerate(needs)},
    )
    told = shipping.first()
    assert Counter(needs[each.rank] for each in told) == Counter(set(needs))
    waiting = list(told)
    reports = 0
    while waiting:
        each = waiting.pop(choose.randrange(len(waiting)))
        assert shipping.arrived(each.rank)
        reports += shipping.is_worth_telling
        more = shipping.after(each.rank, HERE if each.share else None)
        assert bool(more) == each.share
        told += more
        waiting += more
    assert sorted(each.rank for each in told) == list(range(len(needs)))
    assert shipping.fetched == len(needs)
    assert reports == min(10, len(needs))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("shy", [False, True])
def test_a_simulated_cluster_ships_in_any_order(seed: int, shy: bool) -> None:
    choose = random.Random(seed).choice
    cluster = SimulatedCluster(6)
    cluster.digests = {4: b"other", 5: b"other"}
    workers = [cluster.add_worker(rank) for rank in range(6)]
    workers[0].says_fetched = not shy
    job = cluster.submit(m.JobRequest(2))
    cluster.settle(choose)
    assert cluster.phases(job)[-1] is m.JobPhase.FINISHED
    commands = [worker.told for worker in workers]
    assert [len(each) for each in commands] == [1] * 6
    results = [each.copy for (each,) in commands]
    first = None if shy else m.LocalCopy(1, 7)
    assert results == [None, first, first, first, None, m.LocalCopy(5, 7)]
    shipped = [each for each in cluster.events[job] if isinstance(each, m.Shipped)]
    assert [each.ranks for each in shipped] == [1, 2, 3, 4, 5, 6]
    assert cluster.master.status(cluster.now).jobs[0].fetched_ranks == 6


@pytest.mark.parametrize("seed", range(20))
def test_a_worker_that_dies_while_others_wait_for_its_copy_hangs_nobody(seed: int) -> None:
    chance = random.Random(seed)
    cluster = SimulatedCluster(4)
    workers = [cluster.add_worker(rank) for rank in range(4)]
    job = cluster.submit(m.JobRequest(2))
    for _ in range(1000):
        if workers[0].told:
            break
        chance.choice(cluster.choices())()
    if seed % 2:
        cluster._fetches(workers[0])
    cluster.kill(workers[0])
    cluster.settle(chance.choice)
    assert cluster.phases(job)[-1] is m.JobPhase.FAILED
    assert cluster.busy() == {1: 0, 2: 0, 3: 0}
    assert cluster.released == [job]


# --- copies on a host -----------------------------------------------------------------------------


def test_a_copy_is_read_by_place_and_known_by_digest() -> None:
    digest = digest_of(LARGE)
    with OfferedCopy(LARGE) as copy:
        place = copy.place
        assert read_copy(place, digest, MAX_JOB_BYTES) == LARGE
        assert read_copy(place, digest, MAX_JOB_BYTES) == LARGE
        assert read_copy(place, digest_of(b""), MAX_JOB_BYTES) is None
        assert read_copy(place, digest, len(LARGE) - 1) is None
        with pytest.raises(OSError, match="not permitted"):
            os.write(place.descriptor, b"other bytes")
    assert read_copy(place, digest, MAX_JOB_BYTES) is None


def test_places_that_hold_no_copy() -> None:
    reading, writing = os.pipe()  # to read from it would wait for ever
    try:
        for place in (
            m.LocalCopy(os.getpid(), reading),
            m.LocalCopy(os.getpid(), 1 << 31),
            m.LocalCopy((1 << 32) - 1, 0),
            m.LocalCopy(1, 0),
        ):
            assert read_copy(place, b"", MAX_JOB_BYTES) is None
    finally:
        os.close(reading)
        os.close(writing)
