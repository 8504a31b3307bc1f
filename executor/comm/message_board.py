"""Boards of ranks that share no memory: what is shown goes to the other members as frames.

A frame says of which board it is, the how-manieth show of it, and which part of how many bytes. An
array that one member reads goes to that one alone. What carries the frames is a `Carrier`: gRPC
streams between hosts (`remote`), or MPI (`mpi`).
"""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from plancompiler.errors import PlanCompilerError, TransportError, WireFormatError
from plancompiler.executor.comm import host_wire
from plancompiler.executor.comm import remote_wire as wire
from plancompiler.executor.comm.departures import Departures, stopped_rank
from plancompiler.executor.comm.mirror import CLOSE_SECONDS, Carrier, Frame, MirrorTransport
from plancompiler.executor.comm.operations import ALL, Arrays, Targets, board_digest
from plancompiler.executor.comm.patience import Patience, Work
from plancompiler.executor.comm.peer_work import PeerWork
from plancompiler.executor.process_status import StoppedProcesses, end_stopped_at_exit
from plancompiler.ir import DType
from plancompiler.ir.shard import element_count
from plancompiler.limits.time_limits import DEADLINE, if_unseen

SHOW = 32
"""Kind of the frames of boards; others are those of `remote_wire`."""
SIGN = 33
"""Kind of the frames in which ranks speak of their work (see `peer_work`)."""
MAX_MESSAGE = 1 << 40
"""Bytes that one member may show at once."""

_SHOW = struct.Struct("<B7x16sQQQ")
_HEAD = struct.Struct("<Q")
_ALIGN = 8
"""Arrays begin at multiples of this."""

_Key = tuple[int, bytes, int]
"""Sender, board, and number of the show."""


class _Part(NamedTuple):
    """A frame of a board, taken apart."""

    board: bytes
    number: int
    offset: int
    total: int


class _Message:
    """What a member shows, as far as it has come."""

    def __init__(self, total: int) -> None:
        self.data = bytearray()
        self.total = total

    @property
    def complete(self) -> bool:
        return len(self.data) == self.total


class MessageBoardMaker(Departures):
    """One rank's boards over a carrier, which connects it to all other ranks of the world.

    `deadline` (seconds) is how long those that are waited for may stand still, `start_deadline` how
    long they may take to be there at all. `closing` is called when all is over, `linger` seconds
    after the end if others have not said goodbye before: what they still send then finds nobody.
    `far` is `BoardMaker.far`.
    """

    def __init__(
        self,
        carrier: Carrier,
        rank: int,
        size: int,
        deadline: float = DEADLINE,
        closing: Callable[[], None] | None = None,
        linger: float = 0.0,
        far: Callable[[str], MirrorTransport] | None = None,
        start_deadline: float = 0.0,
    ) -> None:
        super().__init__()
        self.rank = rank
        self.far = far
        self.deadline = deadline
        self.failed: Callable[[PlanCompilerError], None] = lambda error: None
        self.changed = threading.Condition()
        self._carrier = carrier
        self._peers = tuple(peer for peer in range(size) if peer != rank)
        self._messages: dict[_Key, _Message] = {}
        self._start_deadline = start_deadline
        self._work = PeerWork(rank, self._peers, self._send_sign)
        self._stopped = StoppedProcesses()
        self._closed = False
        self._closing = closing
        self._linger = linger
        carrier.open(self._peers, self)
        self._work.introduce()

    def board(self, ranks: tuple[int, ...], stream: str = "") -> MessageBoard:
        """See `BoardMaker.board`."""
        return MessageBoard(self, ranks, stream)

    def abort(self, error: PlanCompilerError) -> None:
        """See `BoardMaker.abort`; the first call counts."""
        self._fail(self.rank, error)

    def close(self) -> None:
        """See `BoardMaker.close`."""
        if self._closed:
            return
        self._closed = True
        last, hurry = Frame(bytes([wire.GOODBYE])), False
        if self.failure is not None:
            last, hurry = Frame(host_wire.pack_abort(*self.failure)), True
        self._carrier.close(last, hurry, CLOSE_SECONDS)
        with self.changed:
            self.changed.wait_for(
                lambda: self.failure is not None or self.gone.issuperset(self._peers), self._linger
            )
        if self._closing is not None:
            self._closing()

    def _fail(self, failed: int, error: PlanCompilerError) -> None:
        with self.changed:
            if self.failure is not None:
                return
            self.failure = failed, error
            self.changed.notify_all()
        self.failed(error)
        packet = Frame(host_wire.pack_abort(failed, error))
        for peer in self._peers:
            if peer != failed and peer not in self.gone:
                self._carrier.send(peer, packet)

    # --- what boards ask --------------------------------------------------------------------------

    def send(self, peer: int, board: bytes, number: int, data: bytes) -> None:
        """Give a peer what a board shows it."""
        for offset in range(0, len(data), wire.CHUNK_BYTES):
            head = _SHOW.pack(SHOW, board, number, offset, len(data))
            part = data[offset : offset + wire.CHUNK_BYTES]
            self._carrier.send(peer, Frame(head + part, sent=self._work.move))

    def take(
        self, board: MessageBoard, name: bytes, number: int, label: object
    ) -> dict[int, bytearray]:
        """What all peers on a board have shown, by rank; waits for it."""
        keys = {rank: (rank, name, number) for rank in board.ranks if rank != self.rank}
        with self.changed:

            def missing() -> list[int]:
                messages = self._messages
                return [
                    rank
                    for rank, key in keys.items()
                    if key not in messages or not messages[key].complete
                ]

            try:
                self.await_members(self.changed, board.ranks, missing, label, board.deadline)
            finally:
                self._work.wait(())
            if self.failure is not None:
                raise self.abort_error()
            return {rank: self._messages.pop(key).data for rank, key in keys.items()}

    # --- whether others work ----------------------------------------------------------------------

    def work_of(self, rank: int) -> Work | None:
        """See `Departures.work_of`."""
        return self._work.work_of(rank)

    def patience(self, deadline: float) -> Patience:
        """See `Departures.patience`."""
        unseen = if_unseen(deadline)
        if not all(map(self._work.is_known, self._peers)):
            unseen = max(unseen, self._start_deadline)
        return Patience(deadline, self.work_of, unseen=unseen)

    def look_at(self, patience: Patience, ranks: list[int], label: object) -> bool:
        """See `Departures.look_at`."""
        self._work.wait(ranks)
        behind = self._work.behind(ranks)
        processes = self._work.processes(behind)
        status = self._stopped.look(processes)
        if status is not None:
            end_stopped_at_exit(status.pid)
            raise stopped_rank(label, processes[status.pid], status)
        self._work.ask(behind, patience)
        return patience.is_over(behind)

    def _send_sign(self, peer: int, note: bytes) -> None:
        if peer not in self.gone:
            self._carrier.send(peer, Frame(bytes([SIGN]) + note))

    # --- what comes -------------------------------------------------------------------------------

    def receive(self, rank: int, frame: bytes) -> bool:
        """See `Receiver.receive`."""
        try:
            return self._receive(rank, frame)
        except PlanCompilerError as error:
            self._fail(rank, error)
            return False

    def _receive(self, rank: int, frame: bytes) -> bool:
        kind = frame[0] if frame else -1
        if kind == SIGN:
            self._work.receive(rank, frame[1:])
            return True
        if kind == SHOW:
            self._work.move()
            part = _unpack(frame)
            with self.changed:
                key = (rank, part.board, part.number)
                message = self._messages.setdefault(key, _Message(part.total))
                if part.total != message.total or part.offset != len(message.data):
                    raise WireFormatError(f"rank {rank} sent parts out of their order", rank=rank)
                message.data += memoryview(frame)[_SHOW.size :]
                if len(message.data) > message.total:
                    raise WireFormatError(f"rank {rank} sent more than it said", rank=rank)
                if message.complete:
                    self.changed.notify_all()
            return True
        if kind == wire.GOODBYE:
            with self.changed:
                self.gone.add(rank)
                self.changed.notify_all()
            return False
        if kind == wire.ABORT:
            failed, report = host_wire.unpack_abort(frame)
            self._fail(failed, PlanCompilerError.from_report(report))
            return False
        raise WireFormatError(f"rank {rank} sent an unknown frame", rank=rank, got=kind)

    def lost(self, rank: int, reason: str) -> None:
        """See `Receiver.lost`."""
        if rank not in self.gone and not self._closed:
            self._fail(
                rank,
                TransportError(
                    f"rank {rank} went away",
                    rank=rank,
                    got=reason,
                    hint="look at its own messages: its process ended or stands still, or its "
                    "host is cut off",
                ),
            )


def _unpack(frame: bytes) -> _Part:
    if len(frame) < _SHOW.size:
        raise WireFormatError("a frame of a board has no header")
    _, board, number, offset, total = _SHOW.unpack_from(frame)
    if total > MAX_MESSAGE:
        raise WireFormatError("what a member shows is too large", got=f"{total} bytes")
    return _Part(board, number, offset, total)


class MessageBoard:
    """One member's view of a group without shared memory."""

    def __init__(self, maker: MessageBoardMaker, ranks: tuple[int, ...], stream: str) -> None:
        self.ranks = ranks
        self.member = ranks.index(maker.rank)
        self.deadline = maker.deadline
        self._maker = maker
        self._count = 0
        self._name = board_digest(ranks, stream)

    def show(
        self, call: str, arrays: Arrays, label: object, targets: Targets = None
    ) -> list[tuple[str, Arrays]]:
        """See `Board.show`."""
        self._count += 1
        for place, rank in enumerate(self.ranks):
            if place != self.member:
                data = _pack(call, arrays, targets, place)
                self._maker.send(rank, self._name, self._count, data)
        came = self._maker.take(self, self._name, self._count, label)
        return [
            (call, arrays) if rank == self._maker.rank else _read(came[rank], rank)
            for rank in self.ranks
        ]

    def leave(self, label: object) -> None:
        """See `Board.leave`: what others read are copies."""


def _pack(call: str, arrays: Arrays, targets: Targets, reader: int) -> bytes:
    """What a member shows to one reader; arrays for others are sent without elements."""
    shown = [
        array if targets is None or targets[place] in (ALL, reader) else None
        for place, array in enumerate(arrays)
    ]
    kinds = [
        [array.dtype.name, [0] if part is None else list(array.shape)]
        for array, part in zip(arrays, shown, strict=True)
    ]
    text = json.dumps([call, kinds]).encode()
    text += b" " * (-len(text) % _ALIGN)
    parts = [_HEAD.pack(len(text)), text]
    for part in shown:
        if part is not None:
            parts += (part.tobytes(), bytes(-part.nbytes % _ALIGN))
    return b"".join(parts)


def _read(data: bytearray, rank: int) -> tuple[str, Arrays]:
    try:
        (length,) = _HEAD.unpack_from(data)
        start = _HEAD.size + length
        call, kinds = json.loads(bytes(data[_HEAD.size : start]))
        found = []
        for name, shape in kinds:
            if any(type(extent) is not int for extent in shape):
                raise TypeError("a shape is no list of whole numbers")
            dtype = DType.parse(name).numpy
            nbytes = element_count(tuple(shape)) * dtype.itemsize
            array = np.frombuffer(data, np.uint8, nbytes, start).view(dtype)
            found.append(array.reshape(tuple(shape)))
            start += nbytes + -nbytes % _ALIGN
        if start != len(data) or not isinstance(call, str):
            raise ValueError("it has another size than it says")
    except (struct.error, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise WireFormatError(
            "what a member shows does not parse", rank=rank, got=str(error)
        ) from None
    return call, tuple(found)
