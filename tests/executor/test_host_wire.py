"""Everything that comes over a socket of the host transport is checked."""

from __future__ import annotations

import os
import random
import secrets
import socket
import threading
from dataclasses import replace

import pytest

from plancompiler.errors import (
    ExecutionError,
    NonFiniteError,
    PlanCompilerError,
    TransportError,
    VersionError,
    WireFormatError,
)
from plancompiler.executor.comm import host_wire as wire
from plancompiler.executor.comm.host import HostLink
from plancompiler.executor.comm.publication import publication_of
from plancompiler.executor.runtime import Runtime
from tests.executor.plans import data_parallel, pipeline


def test_notice_round_trip():
    packet = wire.pack_notice(2, (1 << 63) - 1, 5)
    assert wire.unpack_notice(packet) == (2, (1 << 63) - 1, 5)
    with pytest.raises(WireFormatError):
        wire.unpack_notice(packet + b"x")


def test_abort_round_trip():
    error = NonFiniteError("a", op="b", source="c", rank=3, got="d", expected="e", hint="f")
    assert wire.unpack_abort(wire.pack_abort(7, error)) == (7, error.report)


def test_abort_fits_a_packet_whatever_its_texts():
    huge = "\u00e9" * 100_000
    error = ExecutionError(huge, op=huge, source=huge, got=huge, expected=huge, hint=huge)
    packet = wire.pack_abort(0, error)
    assert len(packet) <= wire.MAX_PACKET
    assert wire.unpack_abort(packet)[1].code == ExecutionError.code


def test_directory_round_trip():
    publication = replace(publication_of(data_parallel(2)[0]), records={"name": "text"})
    directory = wire.unpack_directory(wire.pack_directory(publication, [0, 1]))
    assert directory.blocks == (0, 1)
    assert directory.groups == publication.groups
    assert directory.records == publication.records
    assert list(directory.regions) == [region.key for region in publication.regions]
    for region in publication.regions:
        entry = directory.regions[region.key]
        assert (entry.block, entry.offset, entry.stride) == (
            region.block,
            region.offset,
            region.stride,
        )
        assert (entry.shape, entry.dtype) == (region.shape, region.dtype)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{}",
        b'{"blocks":[-1],"groups":[],"regions":[],"reads":[],"records":{}}',
        b'{"blocks":[true],"groups":[],"regions":[],"reads":[],"records":{}}',
        b'{"blocks":[],"groups":[[1,2]],"regions":[],"reads":[],"records":{}}',
        b'{"blocks":[],"groups":[],"regions":[[1,0,0,4,0,"float32",[1]]],"reads":[],"records":{}}',
        b'{"blocks":[],"groups":[],"regions":[[1,0,0,4,1,"object",[1]]],"reads":[],"records":{}}',
        b'{"blocks":[],"groups":[],"regions":[[1,0,-4,4,1,"float32",[1]]],"reads":[],"records":{}}',
        b'{"blocks":[],"groups":[],"regions":[],"reads":[],"records":[1]}',
        b'{"blocks":[],"groups":[],"regions":[],"reads":[[1,2,3]],"records":{}}',
        b'{"blocks":[],"groups":[],"regions":[],"reads":[[1,2,-3,[]]],"records":{}}',
        b'{"blocks":[],"groups":[],"regions":[],"reads":[[1,2,3,[[0,true]]]],"records":{}}',
        b"[" * 100_000,
    ],
)
def test_bad_directories(text):
    with pytest.raises(WireFormatError):
        wire.unpack_directory(text)


def test_random_bytes_are_refused():
    """Each parser either understands bytes or raises its own error."""
    rng = random.Random(3)
    publication = publication_of(data_parallel(2)[0])
    good = [
        wire.pack_directory(publication, [0]),
        wire.pack_abort(1, ExecutionError("x", rank=2)),
        wire.pack_notice(1, 2, 3),
    ]
    refused = 0
    for _ in range(600):
        data = bytearray(rng.choice(good))
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        data = data[: rng.randint(1, len(data))]
        for parse in (wire.unpack_directory, wire.unpack_abort, wire.unpack_notice):
            try:
                parse(bytes(data))
            except WireFormatError:
                refused += 1
    assert refused > 600


def test_a_register_outside_its_memory_is_refused():
    memories = [wire.SharedMemory("test", 64) for _ in range(2)]
    text = (
        b'{"blocks":[0],"groups":[],"regions":[[7,0,32,64,1,"float32",[16]]],'
        b'"reads":[],"records":{}}'
    )
    directory = wire.SharedMemory("test", len(text))
    directory.buffer()[:] = bytearray(text)
    peer = wire.PeerMemory(
        1, [directory.descriptor, memories[0].descriptor, memories[1].descriptor]
    )
    with pytest.raises(WireFormatError, match="outside its memory"):
        peer.slots(7)
    assert peer.slots(8) is None
    for memory in (directory, *memories):
        memory.close_descriptor()


def test_memory_that_could_shrink_is_refused():
    descriptor = os.memfd_create("plancompiler-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 4096)
    with pytest.raises(TransportError, match="not sealed"):
        wire.map_peer(descriptor)
    os.close(descriptor)


def test_peers_cannot_write_our_memory():
    memory = wire.SharedMemory("test", 8)
    with pytest.raises(TypeError):
        wire.map_peer(memory.descriptor)[0] = 1
    memory.close_descriptor()


def test_shared_memory_of_impossible_size():
    with pytest.raises(TransportError, match="shared memory could not be had"):
        wire.SharedMemory("test", 1 << 60)


def test_a_private_block_cannot_be_read_by_others():
    link = HostLink(secrets.token_hex(8), 0)
    plan = pipeline(2)[0]
    for block in plan.blocks:
        link.allocate(block.index, block.nbytes, False, block.purpose)
    with pytest.raises(TransportError, match="its block is private"):
        link.connect(publication_of(plan), Runtime(plan, link), 5.0)
    link.close()


class Handshake:
    """Rank 0 of a pipeline in a thread, and a hand-made peer that calls it."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(8)
        self.runtime = Runtime(pipeline(2)[0], HostLink(self.token, 0), deadline=30.0)
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._prepare)

    def _prepare(self) -> None:
        try:
            self.runtime.prepare()
        except PlanCompilerError as error:
            self.failure = error

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.thread.join()
        self.runtime.close()

    def call(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        while True:
            try:
                connection.connect(wire.socket_name(self.token, 0))
                return connection
            except ConnectionRefusedError:
                continue

    def join_properly(self) -> None:
        """Let the real rank 1 join, so that rank 0 can go on."""
        with Runtime(pipeline(2)[1], HostLink(self.token, 1), deadline=30.0) as peer:
            peer.prepare()
            self.thread.join()


def run_until_it_fails(runtime: Runtime) -> None:
    """Runs of no steps succeed until a failure has come in."""
    while True:
        runtime.run(0)


@pytest.mark.parametrize(
    "greeting", [b"", b"hello", b"x" * 60, b"x" * 9000, "wrong token", "wrong rank"]
)
def test_strangers_are_sent_away(greeting):
    with Handshake() as handshake:
        with handshake.call() as stranger:
            if greeting == "wrong token":
                wire.send_hello(stranger, "another", 1, [])
            elif greeting == "wrong rank":
                wire.send_hello(stranger, handshake.token, 3, [])
            elif greeting:
                stranger.send(greeting)
            else:
                stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(10) == b""
        handshake.join_properly()
    assert handshake.failure is None


def test_another_version_is_refused(monkeypatch):
    with Handshake() as handshake, handshake.call() as peer:
        packed = wire._HELLO.pack(wire._MAGIC, 99, 1, 0, wire._proof(handshake.token))
        peer.send(packed)
        handshake.thread.join()
    assert isinstance(handshake.failure, VersionError)
    assert "99" in str(handshake.failure)


@pytest.mark.parametrize(
    ("packet", "text"),
    [
        (b"\x77", "could not be understood"),
        (b"\x01", "could not be understood"),
        (b"\x01" * 9000, "could not be understood"),
        (wire.pack_notice(1, 5, 5), "does not share"),
        (None, "rank 1 went away"),
    ],
)
def test_a_peer_that_talks_nonsense_stops_the_run(packet, text):
    directory_text = b'{"blocks":[],"groups":[],"regions":[],"reads":[],"records":{}}'
    directory = wire.SharedMemory("directory", len(directory_text))
    directory.buffer()[:] = bytearray(directory_text)
    counters = wire.SharedMemory("counters", 64)
    with Handshake() as handshake:
        with handshake.call() as peer:
            wire.send_hello(peer, handshake.token, 1, [directory.descriptor, counters.descriptor])
            _, descriptors = wire.receive_hello(peer, handshake.token)
            wire.close_descriptors(descriptors)
            handshake.thread.join()
            if packet is not None:
                peer.send(packet)
                # Rank 0 closes or reports; its answer means that it has seen the packet.
                assert peer.recv(wire.MAX_PACKET)[:1] in (b"", bytes([wire.ABORT]))
        with pytest.raises(ExecutionError, match=text):
            run_until_it_fails(handshake.runtime)
    directory.close_descriptor()
    counters.close_descriptor()
