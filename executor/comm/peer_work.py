"""What ranks that share no memory tell each other of their work, so that waits know who works.

Each rank says once which process it is: ranks of its host then see that in /proc. Whoever waits
asks those that it waits for, now and then; they say how much CPU time they have used, what they
have sent and received, and for whom they wait themselves. Work that holds the interpreter
keeps a rank from answering, so another rank of its host is asked too, which sees its process.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from plancompiler.errors import WireFormatError
from plancompiler.executor.comm.patience import Patience, Progress, work_of_process
from plancompiler.executor.host_identity import HOST_VARIABLE
from plancompiler.executor.process_status import process_space

ASKS = 15
"""How often ranks are asked within a deadline,"""
RANKS_PER_SECOND = 64.0
"""but in a large world less often: the answers of one that all wait for must cost it little."""
_PROCESS, _ASK, _WORK = "process", "ask", "work"


class _Place(NamedTuple):
    """Where a rank is."""

    space: str
    """Empty where no process of another rank can be seen."""
    pid: int


class PeerWork:
    """One rank's view of the work of others. `send` takes a note to a rank."""

    def __init__(self, rank: int, peers: Sequence[int], send: Callable[[int, bytes], None]) -> None:
        self._moved = 0
        self._rank = rank
        self._peers = peers
        self._send = send
        space = process_space()
        # Under another name it is another host, as for the host transport.
        self._own = _Place(space and f"{space}/{os.environ.get(HOST_VARIABLE, '')}", os.getpid())
        self._places: dict[int, _Place] = {}
        self._said: dict[int, Progress] = {}
        self._behind: dict[int, tuple[int, ...]] = {}
        """By rank: for whom it waits, as it has said."""
        self._waits: dict[int, tuple[int, ...]] = {}
        """By thread of this rank: for whom it waits."""
        self._ask_at = 0.0

    def move(self) -> None:
        """This rank sends or has received a part of something."""
        self._moved += 1

    def introduce(self) -> None:
        """Say to all which process this is."""
        for peer in self._peers:
            self._tell(peer, _PROCESS, *self._own)

    def is_known(self, rank: int) -> bool:
        """Whether a rank has said something."""
        return rank in self._places

    # --- what waits ask ---------------------------------------------------------------------------

    def behind(self, ranks: Iterable[int]) -> list[int]:
        """These ranks and those for whom they wait, directly or not, without this one."""
        reached = dict.fromkeys(ranks)
        line = list(reached)
        for rank in line:
            for other in self._behind.get(rank, ()):
                if other not in reached and other != self._rank:
                    reached[other] = None
                    line.append(other)
        return line

    def wait(self, ranks: Sequence[int]) -> None:
        """The calling thread waits for these ranks; for none: no longer."""
        if ranks:
            self._waits[threading.get_ident()] = tuple(ranks)
        else:
            self._waits.pop(threading.get_ident(), None)

    def ask(self, ranks: Iterable[int], patience: Patience) -> None:
        """Ask ranks for their work, unless that was done just now."""
        now = time.monotonic()
        if now < self._ask_at:
            return
        self._ask_at = now + max(patience.deadline / ASKS, len(self._peers) / RANKS_PER_SECOND)
        asked = dict.fromkeys(ranks)
        for rank in tuple(asked):
            place = self._places.get(rank)
            if place is not None and place.space and place.space != self._own.space:
                for other, beside in self._places.items():
                    if other != rank and beside.space == place.space:
                        asked[other] = None
                        break
        for rank in asked:
            self._tell(rank, _ASK)

    def processes(self, ranks: Iterable[int]) -> dict[int, int]:
        """The ranks of this host among these, by process."""
        by_process = {}
        for rank in ranks:
            place = self._places.get(rank)
            if place is not None and place.space and place.space == self._own.space:
                by_process[place.pid] = rank
        return by_process

    def work_of(self, rank: int) -> Progress | None:
        """What a rank has done so far; None where that cannot be seen."""
        said = self._said.get(rank)
        for pid in self.processes([rank]):
            work = work_of_process(pid)
            if work is not None:
                return work._replace(moved=0 if said is None else said.moved)
        return said

    # --- what comes -------------------------------------------------------------------------------

    def receive(self, rank: int, note: bytes) -> None:
        """Take what a rank says; WireFormatError for what makes no sense."""
        try:
            kind, *fields = json.loads(note)
            if kind == _PROCESS:
                space, pid = fields
                if not isinstance(space, str) or type(pid) is not int:
                    raise ValueError("no process")
                self._places[rank] = _Place(space, pid)
            elif kind == _ASK:
                self._answer(rank)
            elif kind == _WORK:
                works, waits = fields
                self._behind[rank] = tuple(each for each in waits if each in self._peers)
                for other, seconds, moved in works:
                    self._hear(other, float(seconds), moved)
            else:
                raise ValueError("an unknown kind")
        except (ValueError, TypeError, RecursionError) as error:
            raise WireFormatError(
                f"rank {rank} says of its work what does not parse", rank=rank, got=str(error)
            ) from None

    def _hear(self, rank: int, seconds: float, moved: int | None) -> None:
        if rank in self._peers:
            if moved is None:  # somebody else says it
                before = self._said.get(rank)
                moved = 0 if before is None else before.moved
            self._said[rank] = Progress(seconds, moved, at=time.monotonic())

    def _answer(self, asker: int) -> None:
        works: list[tuple[int, float, int | None]] = [
            (self._rank, time.process_time(), self._moved)
        ]
        for pid, rank in self.processes(self._peers).items():
            work = None if rank == asker else work_of_process(pid)
            if work is not None:
                works.append((rank, work.cpu_seconds, None))
        waits = {rank for ranks in tuple(self._waits.values()) for rank in ranks}
        self._tell(asker, _WORK, works, sorted(waits))

    def _tell(self, rank: int, kind: str, *fields: Any) -> None:
        self._send(rank, json.dumps([kind, *fields], separators=(",", ":")).encode())
