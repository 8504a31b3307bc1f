"""Frames between ranks that share no memory, and what a server does with strangers."""

from __future__ import annotations

import random
import secrets
import struct
import threading
from collections.abc import Callable, Iterator

import grpc
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plancompiler.errors import (
    ExecutionError,
    PlanCompilerError,
    TransportError,
    VersionError,
    WireFormatError,
)
from plancompiler.executor import threads
from plancompiler.executor.comm import host_wire, remote
from plancompiler.executor.comm import remote_wire as wire
from plancompiler.executor.comm.messages import Frame
from plancompiler.executor.comm.publication import publication_of
from plancompiler.executor.comm.remote import METHOD, SERVICE, PeerServer, plain_channel
from plancompiler.executor.memory import Array
from tests.executor.host_world import own_threads
from tests.executor.pipelines import train
from tests.executor.plans import data_parallel

TOKEN = secrets.token_hex(8)


def test_a_channel_that_does_not_say_how_it_is_gets_one_watcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote, "_POLL_SECONDS", 0.0)
    with plain_channel("127.0.0.1:1") as channel:
        watchers: list[Callable[..., None]] = []
        monkeypatch.setattr(channel, "subscribe", watchers.append)
        line = remote._Line(b"")
        assert line.look(channel) == 0.0
        assert line.look(channel) > 0.0
        assert len(watchers) == 1


@st.composite
def arrays_and_boxes(draw: st.DrawFn) -> tuple[Array, tuple[tuple[int, int], ...]]:
    shape = draw(st.lists(st.integers(0, 7), max_size=4))
    dtype = draw(st.sampled_from(["float32", "int8", "bool", "float64", "float16"]))
    box = []
    for extent in shape:
        start = draw(st.integers(0, extent))
        box.append((start, draw(st.integers(start, extent))))
    size = int(np.prod(shape))
    return np.arange(size).reshape(shape).astype(dtype), tuple(box)


@settings(max_examples=200, deadline=None)
@given(case=arrays_and_boxes(), limit=st.integers(1, 200))
def test_a_box_travels_in_pieces_of_bounded_size(case, limit):
    array, box = case
    target = np.zeros_like(array)
    wanted = np.zeros_like(array)
    index = tuple(slice(*bounds) for bounds in box) or ...
    wanted[index] = array[index]
    for part in wire.cut_region(box, array.itemsize, limit):
        place = array[tuple(slice(*bounds) for bounds in part) or ...]
        assert 0 < place.nbytes <= max(limit, array.itemsize)
        frame = b"".join(Frame(wire.pack_data(5, 1, part, False), place).parts())
        header = wire.unpack_data(frame)
        assert (header.region, header.slot) == (5, 1)
        wire.store_data(frame, header, (np.zeros(0), target))
    np.testing.assert_array_equal(target, wanted)


def test_a_part_of_the_flat_register():
    target = np.zeros((3, 4), np.float32)
    part = np.arange(5, dtype=np.float32)
    frame = b"".join(Frame(wire.pack_data(5, 0, ((6, 11),), True), part).parts())
    wire.store_data(frame, wire.unpack_data(frame), (target,))
    np.testing.assert_array_equal(target.reshape(-1)[6:11], part)
    assert np.count_nonzero(target) == 4


@pytest.mark.parametrize(
    ("slot", "box", "flat", "nbytes"),
    [
        (1, ((0, 3), (0, 4)), False, 48),
        (0, ((0, 3), (0, 5)), False, 60),
        (0, ((2, 1), (0, 4)), False, 16),
        (0, ((0, 3),), False, 48),
        (0, ((0, 13),), True, 52),
        (0, ((0, 3), (0, 4)), False, 47),
        (0, ((0, 3), (0, 4)), False, 0),
    ],
)
def test_data_outside_of_a_register_are_refused(slot, box, flat, nbytes):
    target = np.zeros((3, 4), np.float32)
    frame = wire.pack_data(5, slot, box, flat) + b"\1" * nbytes
    with pytest.raises(WireFormatError):
        wire.store_data(frame, wire.unpack_data(frame), (target,))
    assert not target.any()


def test_directories_travel_in_parts(monkeypatch):
    monkeypatch.setattr(wire, "CHUNK_BYTES", 100)
    publication = publication_of(train("1f1b", 4, 1, False, 2)[1], 3)
    frames = wire.pack_directory(publication, 0)
    assert len(frames) > 1
    reader = wire.DirectoryReader(0)
    *first, last = [reader.add(frame) for frame in frames]
    assert not any(first)
    directory = last
    assert directory.groups == publication.groups
    assert set(directory.regions) == {region.key for region in publication.regions}
    assert directory.reads == tuple(read for read in publication.reads if read.rank == 0)
    assert directory.reads


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack("<B7xQ", wire.DIRECTORY, 1 << 40) + b"x",
        struct.pack("<B7xQ", wire.DIRECTORY, 4),
        struct.pack("<B7xQ", wire.DIRECTORY, 1) + b"xx",
        struct.pack("<B7xQ", wire.DIRECTORY, 2) + b"[]",
        struct.pack("<B7xQ", wire.DIRECTORY, 14) + b'{"reads":[[1]]}'[:14],
        struct.pack("<B7xQ", wire.DIRECTORY, 15) + b'{"reads":[[1]]}',
    ],
)
def test_bad_directories(frame):
    with pytest.raises(WireFormatError):
        wire.DirectoryReader(0).add(frame)


def test_random_bytes_are_refused():
    """Each parser either understands bytes or raises its own error."""
    rng = random.Random(5)
    publication = publication_of(data_parallel(2)[0])
    good = [
        wire.pack_hello(TOKEN, 0, 1),
        *wire.pack_directory(publication, 1),
        wire.pack_data(5, 0, ((0, 3), (0, 4)), False) + bytes(48),
        wire.pack_barrier(3, 4),
        host_wire.pack_abort(1, ExecutionError("x", rank=2)),
    ]
    slots = (np.zeros((3, 4), np.float32),)
    parsers = [
        wire.unpack_hello,
        lambda frame: wire.DirectoryReader(0).add(frame),
        lambda frame: wire.store_data(frame, wire.unpack_data(frame), slots),
        wire.unpack_barrier,
    ]
    refused = 0
    for _ in range(500):
        data = bytearray(rng.choice(good))
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        data = data[: rng.randint(1, len(data))]
        for parse in parsers:
            try:
                parse(bytes(data))
            except PlanCompilerError:
                refused += 1
    assert refused > 500


def test_greetings():
    hello = wire.unpack_hello(wire.pack_hello(TOKEN, 2, 7))
    assert (hello.sender, hello.receiver, hello.run) == (2, 7, wire.run_name(TOKEN))
    assert wire.is_of_run(hello, TOKEN)
    assert not wire.is_of_run(hello, "other")
    assert not wire.is_of_run(hello._replace(sender=3), TOKEN)
    frame = bytearray(wire.pack_hello(TOKEN, 2, 7))
    frame[4] += 1
    with pytest.raises(VersionError, match="rank 2 speaks another version"):
        wire.unpack_hello(bytes(frame))
    frame = wire.pack_hello(TOKEN, 2, 7).replace(b"little", b"biggle")
    with pytest.raises(TransportError, match="another byte order"):
        wire.unpack_hello(frame)


# --- servers --------------------------------------------------------------------------------------


class Listener:
    """Takes what a server hands over."""

    rank = 1

    def __init__(self) -> None:
        self.frames: list[tuple[int, bytes]] = []
        self.losses: list[int] = []
        self.reasons: list[str] = []

    def receive(self, rank: int, frame: bytes) -> bool:
        self.frames.append((rank, frame))
        return frame[0] != wire.GOODBYE

    def lost(self, rank: int, reason: str) -> None:
        self.losses.append(rank)
        self.reasons.append(reason)


@pytest.fixture
def server() -> Iterator[PeerServer]:
    server = PeerServer("127.0.0.1:0")
    yield server
    server.close()


def say(server: PeerServer, frames: list[bytes]) -> bytes:
    """The greeting, and all others with their checks."""
    checked = [wire.with_check([frame], place) for place, frame in enumerate(frames)]
    return say_as_is(server, [*frames[:1], *checked[1:]])


def say_as_is(server: PeerServer, frames: list[bytes]) -> bytes:
    with plain_channel(f"127.0.0.1:{server.port}") as channel:
        call = channel.stream_unary(f"/{SERVICE}/{METHOD}", None, None)
        return call(iter(frames), timeout=30)


def test_a_stream_reaches_its_rank(server):
    listener = Listener()
    server.attach(TOKEN, listener)
    goodbye = bytes([wire.GOODBYE])
    say(server, [wire.pack_hello(TOKEN, 0, 1), wire.pack_barrier(0, 1), goodbye])
    assert listener.frames == [(0, wire.pack_barrier(0, 1)), (0, goodbye)]
    assert listener.losses == []
    say(server, [wire.pack_hello(TOKEN, 0, 1), wire.pack_barrier(0, 2)])
    assert listener.losses == [0]
    with pytest.raises(TransportError, match="started twice"):
        server.attach(TOKEN, listener)


def flipped(frame: bytes, at: int) -> bytes:
    return bytes([*frame[:at], frame[at] ^ 4, *frame[at + 1 :]])


DAMAGES: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "a header": lambda frames: [*frames[:2], flipped(frames[2], 9), *frames[3:]],
    "a number": lambda frames: [*frames[:2], flipped(frames[2], -20), *frames[3:]],
    "a check": lambda frames: [*frames[:2], flipped(frames[2], -1), *frames[3:]],
    "twice": lambda frames: [*frames[:3], *frames[2:]],
    "lost": lambda frames: [*frames[:2], *frames[3:]],
    "exchanged": lambda frames: [frames[0], frames[1], frames[3], frames[2], frames[4]],
    "cut": lambda frames: [*frames[:2], frames[2][:-1], *frames[3:]],
    "short": lambda frames: [*frames[:2], b"abc", *frames[3:]],
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("nbytes", [64, 1 << 18])
def test_frames_that_are_not_what_was_sent_end_a_stream(nbytes, damage, server):
    listener = Listener()
    server.attach(TOKEN, listener)
    data = wire.pack_data(1, 0, ((0, nbytes),), True) + bytes(nbytes)
    frames = [wire.pack_barrier(0, 1), data, data[:-1] + b"x", bytes([wire.GOODBYE])]
    sent = [wire.with_check([frame], place) for place, frame in enumerate(frames, start=1)]
    say_as_is(server, DAMAGES[damage]([wire.pack_hello(TOKEN, 0, 1), *sent]))
    assert listener.losses == [0]
    assert "was damaged, repeated or lost on its way" in listener.reasons[0]
    came = 2 if damage == "twice" else 1
    assert [bytes(frame) for _, frame in listener.frames] == frames[:came]


@pytest.mark.parametrize(
    "greeting",
    [
        b"",
        b"hello",
        b"x" * 200,
        wire.pack_hello(TOKEN, 0, 1)[:-1] + b"?",
        wire.pack_barrier(0, 1),
        wire.pack_hello(TOKEN, 0, 1).replace(b"plancompiler.net", b"plancompiler.???"),
    ],
    # The token is random: it must not get into the names of the tests.
    ids=["nothing", "a word", "too long", "a wrong token", "a barrier", "another program"],
)
def test_strangers_are_sent_away(greeting, server):
    listener = Listener()
    server.attach(TOKEN, listener)
    with pytest.raises(grpc.RpcError) as caught:
        say(server, [greeting, wire.pack_barrier(0, 1)])
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert (listener.frames, listener.losses) == ([], [])


def test_a_stream_that_hangs_is_left_behind_by_name(server, monkeypatch, caplog):
    """Closing waits for the threads of streams, and not without end."""
    monkeypatch.setattr(threads, "THREAD_SECONDS", 0.05)
    entered, goes_on = threading.Event(), threading.Event()

    class Hanging(Listener):
        def receive(self, rank: int, frame: bytes) -> bool:
            entered.set()
            goes_on.wait(30)
            return super().receive(rank, frame)

    server.attach(TOKEN, Hanging())
    barrier = wire.with_check([wire.pack_barrier(0, 1)], 1)
    with plain_channel(f"127.0.0.1:{server.port}") as channel:
        call = channel.stream_unary(f"/{SERVICE}/{METHOD}", None, None)
        running = call.future(iter([wire.pack_hello(TOKEN, 0, 1), barrier]))
        assert entered.wait(30)
        server.close()
        assert running.exception() is not None
    (note,) = caplog.messages
    assert "the thread plancompiler-peer did not end within 0.05 s" in note
    assert "threading.py" in note
    goes_on.set()
    server.close()  # which waits for it now
    assert own_threads() == []


def test_a_port_that_is_taken(server):
    with pytest.raises(TransportError, match="cannot be listened to"):
        PeerServer(f"127.0.0.1:{server.port}")
