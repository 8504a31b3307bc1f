"""What every kind of link must do, as a function that each of its ranks calls."""

from __future__ import annotations

import queue
import threading

import numpy as np
import pytest

from plancompiler.errors import AbortedError, ExecutionError, PlanCompilerError
from plancompiler.executor.actor import ARRIVED, RETURNED, Notice
from plancompiler.executor.comm.link import (
    Group,
    GroupDesc,
    GroupKey,
    Link,
    MemoryRegion,
    Publication,
    Read,
)
from plancompiler.ir import DType

SECONDS = 60.0
SHAPE = (2, 3)
BOX = ((0, 2), (1, 3))
"""What others read of each slot."""
REGION, ANNOUNCED, READER = 7, 9, 5


class Heard:
    """A sink that keeps what comes."""

    def __init__(self) -> None:
        self.notices: queue.SimpleQueue[tuple[int, int, int]] = queue.SimpleQueue()
        self.failure: PlanCompilerError | None = None
        self.failed = threading.Event()

    def notice(self, kind: int, key: int, reader: int) -> None:
        self.notices.put((kind, key, reader))

    def peer_failed(self, error: PlanCompilerError) -> None:
        self.failure = error
        self.failed.set()


def run(link: Link, size: int) -> None:
    """Everything; every rank has its own memory, of which others read a box."""
    rank, heard = link.rank, Heard()
    peers = tuple(peer for peer in range(size) if peer != rank)
    left, right = (rank - 1) % size, (rank + 1) % size
    buffer = link.allocate(0, 128, True, "suite")
    region = MemoryRegion(REGION, 0, 0, 64, 2, DType.FLOAT32, SHAPE, "values", ANNOUNCED)
    first, second = region.slots(buffer)
    first[...] = 10 + rank
    key = GroupKey(tuple(range(size)), 0, "suite")
    link.connect(
        Publication(
            rank,
            (region,),
            (GroupDesc(key, "the same on all"),),
            peers,
            (Read(left, REGION, ANNOUNCED, READER, BOX),),
            {"name": f"of rank {rank}"},
        ),
        heard,
        SECONDS,
    )
    group = link.group(key)
    assert link.group(key) is group
    assert (group.ranks, group.ranks[group.member]) == (key.ranks, rank)
    records(link, peers)
    pushes(link, second, group, peers)
    notices(link, heard, left, right)
    notes(link, group, left, right)
    failure(link, heard, group, size)
    link.close()
    link.close()


def records(link: Link, peers: tuple[int, ...]) -> None:
    for peer in peers:
        assert link.record(peer, "name") == f"of rank {peer}"
        assert link.record(peer, "another") is None
        assert link.peer_slots(peer, REGION + 1) is None


def pushes(link: Link, own: np.ndarray, group: Group, peers: tuple[int, ...]) -> None:
    """What was pushed is there after the barrier; again, with the array as one dimension."""
    for number, (box, flat) in enumerate(((BOX, False), (((1, 4),), True))):
        own[...] = 100 * number + link.rank
        for peer in peers:
            push = link.push(peer, REGION, 1, box, flat)
            if push is not None:
                push()
        group.barrier("to read")
        for peer in peers:
            slots = link.peer_slots(peer, REGION)
            assert slots is not None
            read = slots[1].reshape(-1) if flat else slots[1]
            index = tuple(slice(*bounds) for bounds in box)
            np.testing.assert_array_equal(read[index], 100 * number + peer)
        group.barrier("to write")


def notices(link: Link, heard: Heard, left: int, right: int) -> None:
    """Whoever is told that a version has arrived can read it."""
    link.notify(Notice(-1, -1, right, ARRIVED, ANNOUNCED, READER))
    assert heard.notices.get(timeout=SECONDS) == (ARRIVED, ANNOUNCED, READER)
    slots = link.peer_slots(left, REGION)
    assert slots is not None
    np.testing.assert_array_equal(slots[0][:, 1:], 10 + left)


def notes(link: Link, group: Group, left: int, right: int) -> None:
    """Notes go to who watches, once it does."""
    told: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
    link.watch(lambda rank, note: told.put((rank, note)))
    group.barrier("to tell")
    link.tell(right, b"a note")
    assert told.get(timeout=SECONDS) == (left, b"a note")


def failure(link: Link, heard: Heard, group: Group, size: int) -> None:
    """One fails: the others are told which, and their waits end."""
    if link.rank == 0:
        for _ in range(size - 1):  # nobody waits for anything else any more
            assert heard.notices.get(timeout=SECONDS) == (RETURNED, ANNOUNCED, READER)
        link.abort(0, ExecutionError("broken on purpose"))
        return
    link.notify(Notice(-1, -1, 0, RETURNED, ANNOUNCED, READER))
    assert heard.failed.wait(SECONDS)
    assert "broken on purpose" in str(heard.failure)
    with pytest.raises(AbortedError, match=r"rank 0 failed.*broken on purpose"):
        group.barrier("after one has failed")
