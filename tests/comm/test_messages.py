"""Rendezvous by messages: what comes is checked, and what is no frame ends the run."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest

from plancompiler.eager import launcher, transports
from plancompiler.errors import (
    AbortedError,
    DeadlineError,
    PlanCompilerError,
    ShapeError,
    TransportError,
)
from plancompiler.executor.comm import messages
from plancompiler.executor.comm.host_wire import GOODBYE as GOODBYE_FRAME
from plancompiler.executor.comm.manager import CommContextManager
from plancompiler.executor.comm.message_rendezvous import MessageWorldLink
from plancompiler.executor.comm.messages import Frame, MessageLink
from plancompiler.executor.comm.remote_wire import CHUNK_BYTES, PUBLISHED
from plancompiler.limits.time_limits import FAILED_GOODBYE, GOODBYE


class Wire:
    """Carries frames between ranks of one process, and keeps what was sent."""

    def __init__(self, rank: int, worlds: dict[int, MessageWorldLink]) -> None:
        self.rank = rank
        self.worlds = worlds
        self.frames: list[bytes] = []
        self.closed: tuple[bool, float] | None = None
        """How it was told to close: in a hurry, and within how many seconds."""

    def open(self, peers, receiver) -> None:
        self.peers = peers

    def send(self, rank: int, frame: Frame) -> None:
        data = frame.encoded()
        if data[0] == PUBLISHED:
            self.frames.append(data)
        if rank in self.worlds:  # else it is yet to come, and what is said of oneself is lost
            self.worlds[rank].link.receive(self.rank, data)

    def close(self, last: Frame, hurry: bool, seconds: float) -> None:
        self.closed = hurry, seconds
        for peer in self.peers:
            self.send(peer, last)

    def where(self, rank: int) -> str:
        return f"rank {rank}"


@pytest.fixture
def worlds() -> dict[int, MessageWorldLink]:
    worlds: dict[int, MessageWorldLink] = {}
    for rank in range(2):
        worlds[rank] = MessageWorldLink(MessageLink(rank, Wire(rank, worlds)), 2, 0.1)
    return worlds


def show(world: MessageWorldLink, *arrays: np.ndarray) -> list[bytes]:
    """The frames by which rank 0 shows these."""
    wire = world.link._carrier
    wire.frames.clear()
    with pytest.raises(DeadlineError):  # nobody answers
        world.rendezvous((0, 1)).publish("a call", arrays, "showing")
    return list(wire.frames)


def test_large_arrays_go_in_pieces(worlds):
    array = np.arange(CHUNK_BYTES, dtype=np.int32)
    frames = show(worlds[0], array, np.zeros((0, 2), np.float16), np.array(True))
    assert len(frames) == 5
    assert max(map(len, frames)) < CHUNK_BYTES + 100
    calls = worlds[1].rendezvous((0, 1)).publish("another", (), "showing")
    call, (large, empty, scalar) = calls[0]
    assert call == "a call"
    np.testing.assert_array_equal(large, array)
    assert (empty.shape, empty.dtype) == ((0, 2), np.float16)
    assert scalar.shape == ()


def test_only_the_reader_of_an_array_gets_it(worlds):
    pieces = (np.zeros(1000), np.ones(1000))
    rendezvous = worlds[0].rendezvous((0, 1))
    with pytest.raises(DeadlineError, match=r"entered: \[0\]; not entered: \[1\]"):
        rendezvous.publish("a call", pieces, "showing", targets=(0, 1))
    _, (not_mine, mine) = worlds[1].rendezvous((0, 1)).publish("a call", (), "showing")[0]
    assert not_mine.size == 0
    np.testing.assert_array_equal(mine, pieces[1])


def test_frames_that_are_none_end_the_run(worlds):
    """Cut, out of order, too long, or of any bytes: a failure on all ranks, and no exception."""
    frames = show(worlds[0], np.arange(CHUNK_BYTES, dtype=np.int32))
    rng = np.random.default_rng(5)
    wrong = [
        [b""],
        [bytes([77]) + frames[0][1:]],
        [frames[0][:20]],
        [frames[1]],
        [frames[0], frames[2]],
        [frames[0], frames[0]],
        *([rng.bytes(int(rng.integers(0, 200)))] for _ in range(300)),
        *([bytes([32]) + rng.bytes(int(rng.integers(0, 200)))] for _ in range(300)),
    ]
    for sent in wrong:
        results: dict[int, MessageWorldLink] = {}
        for rank in range(2):
            results[rank] = MessageWorldLink(MessageLink(rank, Wire(rank, results)), 2, 0.1)
        going = [results[1].link.receive(0, frame) for frame in sent]
        if sent[0][:1] == b"\x11":  # of 300 some say goodbye
            continue
        assert not all(going)
        assert results[1].link.failure is not None or 0 in results[1].link.gone
    with pytest.raises(AbortedError):
        results[1].rendezvous((0, 1)).publish("a call", (), "showing")


def test_a_message_that_does_not_parse_is_refused(worlds):
    frames = show(worlds[0], np.arange(4))
    for place in range(40, len(frames[0])):
        torn = bytearray(frames[0])
        torn[place] ^= 0x15
        results: dict[int, MessageWorldLink] = {}
        for rank in range(2):
            results[rank] = MessageWorldLink(MessageLink(rank, Wire(rank, results)), 2, 0.01)
        results[1].link.receive(0, bytes(torn))
        with suppress(PlanCompilerError):  # of whatever kind; any other error is a fault
            results[1].rendezvous((0, 1)).publish("a call", (), "showing")


def test_those_who_left_and_those_who_failed_are_named(worlds):
    comms = {rank: CommContextManager(world) for rank, world in worlds.items()}
    group = comms[0].context((0, 1))
    comms[1].close()
    with pytest.raises(TransportError, match="rank 1 has closed its run"):
        group.barrier()
    worlds[0].link.lost(1, "after its goodbye nobody minds")
    assert worlds[0].link.failure is None
    comms[0].abort(ShapeError("broken on purpose"))
    with pytest.raises(AbortedError, match="broken on purpose"):
        group.barrier()


@pytest.mark.parametrize(
    ("happens", "expected"),
    [
        ("nothing", (False, GOODBYE)),
        ("the peer has left", (False, FAILED_GOODBYE)),
        ("an error, just now", (True, FAILED_GOODBYE)),
        ("an error, some time ago", (True, FAILED_GOODBYE - 0.25)),
        ("an error, long ago", (True, 0.0)),
    ],
)
def test_an_error_leaves_little_time_for_goodbyes(
    happens: str, expected: tuple[bool, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that no longer hears anything is not waited for again when the rank closes."""
    now, worlds, given = 100.0, {}, []
    monkeypatch.setattr(messages.time, "monotonic", lambda: now)
    wire = Wire(0, worlds)
    link = MessageLink(0, wire, given.append, linger=0.125)
    worlds[0] = MessageWorldLink(link, 2, 0.1)
    if happens == "the peer has left":
        link.receive(1, bytes([GOODBYE_FRAME]))
    if happens.startswith("an error"):
        worlds[0].abort(DeadlineError("nobody came"))
    now += {"an error, some time ago": 0.25, "an error, long ago": 60.0}.get(happens, 0.0)
    link.close()
    assert wire.closed == expected
    assert given == [0.0 if expected[0] else 0.125]


def test_who_cannot_join_says_so_to_the_others(
    worlds: dict[int, MessageWorldLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that others never reach has to tell them why it leaves: they may hear it."""
    monkeypatch.setattr(transports, "open_world", lambda *_: worlds[0])
    monkeypatch.setenv("PLANCOMPILER_RANK", "0")
    monkeypatch.setenv("PLANCOMPILER_WORLD_SIZE", "2")
    monkeypatch.setattr(launcher, "process_world", lambda: None)
    with pytest.raises(DeadlineError, match=r"comparing kernels.*not entered: \[1\]"):
        launcher.init()
    failed_rank, error = worlds[1].link.failure
    assert failed_rank == 0
    assert "comparing kernels" in str(error)
    assert worlds[0].link._carrier.closed[0], "in a hurry"
