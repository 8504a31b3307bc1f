"""Ranks that share no memory: each keeps receive buffers for what it reads of its peers.

Whoever makes a version of a region pushes the part that a peer reads into that peer's receive
buffer: before the notice that it arrived, or before the barrier of a collective. Frames between two
ranks stay in order, so that whoever sees a notice or a barrier has the data too. Receive buffers
are reused under the same rules as the regions themselves, so nothing more has to be agreed on.

What carries the frames is a `Carrier`: gRPC streams (`remote`) or MPI (`mpi`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from plancompiler.errors import PlanCompilerError, TransportError, WireFormatError
from plancompiler.executor.actor import ARRIVED, Notice
from plancompiler.executor.comm import host_wire
from plancompiler.executor.comm import remote_wire as wire
from plancompiler.executor.comm.link import (
    GroupKey,
    Publication,
    Read,
    Sink,
    check_groups,
)
from plancompiler.executor.comm.patience import Patience, Progress
from plancompiler.executor.comm.peer_failures import (
    not_understood,
    peers_not_ready,
    stopped_rank,
)
from plancompiler.executor.comm.peer_work import PeerWork
from plancompiler.executor.comm.process_link import ProcessLink
from plancompiler.executor.memory import Array, Buffer, Slots, private_buffer
from plancompiler.executor.process_status import StoppedProcesses, end_stopped_at_exit
from plancompiler.ir.shard import Region, region_index
from plancompiler.ir.task import format_id
from plancompiler.limits import time_limits
from plancompiler.limits.time_limits import if_unseen

CLOSE_SECONDS = time_limits.GOODBYE
"""How long the peers may take to hear the last words of a rank."""
FAILED_SECONDS = time_limits.FAILED_GOODBYE
"""The same, from the failure on, where one is known: it may have cut peers off for good."""
REACH_INTERVAL_SECONDS = time_limits.REACH_INTERVAL
"""How long peers may take to come before it is asked whether they ever will."""


class Frame(NamedTuple):
    """A header and the array whose bytes follow it, which are read when they are sent."""

    header: bytes
    data: Array | None = None
    sent: Callable[[], None] | None = None
    """Called when it is about to be sent."""

    def parts(self) -> tuple[bytes | memoryview, ...]:
        """The frame in pieces that follow one another."""
        if self.sent is not None:
            self.sent()
        if self.data is None:
            return (self.header,)
        data = np.ascontiguousarray(self.data).reshape(-1).view(np.uint8)
        return self.header, data.data

    def encoded(self) -> bytes:
        """The frame as bytes."""
        parts = self.parts()
        return self.header if self.data is None else b"".join(parts)


class Receiver(Protocol):
    """Where a carrier hands over what comes. Called from any thread, for one peer from one."""

    rank: int

    def receive(self, rank: int, frame: bytes) -> bool:
        """Take a peer's frame; False after its last one."""

    def lost(self, rank: int, reason: str) -> None:
        """No more comes from a peer, or goes to it. Not an error where it has said its last."""


class Carrier(Protocol):
    """Takes frames to peers, in order for each of them."""

    def open(self, peers: Sequence[int], receiver: Receiver) -> None:
        """Begin; the peers may not be there yet."""

    def send(self, rank: int, frame: Frame) -> None:
        """Send to a peer some time soon, without waiting."""

    def close(self, last: Frame, hurry: bool, seconds: float) -> None:
        """Send the last frame to all peers and stop. With `hurry`, instead of what still waits."""

    def connect_error(self, rank: int, is_known: bool) -> PlanCompilerError | None:
        """Why a peer never will come, or, where it has and so `is_known`, never will have heard of
        this rank; None where that is not certain. May wait a little.
        """

    def where(self, rank: int) -> str:
        """Where a peer is, for people."""


class MessageGroup:
    """Barriers of one group, by frames. Of its members only peers of the transport count."""

    def __init__(self, link: MessageLink, key: GroupKey, number: int) -> None:
        self.ranks = key.ranks
        self.member = key.ranks.index(link.rank)
        self._link = link
        self._key = key
        self._number = number
        self._count = 0

    def barrier(self, label: object) -> None:
        """See `Group.barrier`."""
        self.announce()
        self.wait(label)

    def announce(self) -> None:
        """Say to all peers that this rank has come."""
        self._count += 1
        self._link.send_barrier(self.ranks, self._number, self._count)

    def missing(self) -> list[int]:
        """See `Group.missing`; members that are peers of the link."""
        return self._link.missing(self._key, self._count)

    def wait(self, label: object) -> None:
        """Return when all peers have come as often as this rank."""
        self._link.wait_for(self._key, self._count, label)


class _Peer:
    """What is known of a peer that has introduced itself."""

    def __init__(self, directory: host_wire.Directory) -> None:
        self.directory = directory
        self.buffers: dict[int, Slots] = {}
        self.counts = dict.fromkeys((key for key, _ in directory.groups), 0)
        self.keys = tuple(self.counts)


class _PushChannel:
    """Pushes the versions of a region, one after another, to a task that copies them."""

    def __init__(self, slots: Sequence[Callable[[], object]], version: int) -> None:
        self._slots = slots
        self._version = version

    def push(self) -> None:
        self._slots[self._version % len(self._slots)]()
        self._version += 1


class MessageLink(ProcessLink):
    """One rank's connection to ranks whose memory it cannot read."""

    def __init__(
        self,
        rank: int,
        carrier: Carrier,
        closing: Callable[[float], object] | None = None,
        linger: float = 0.0,
    ) -> None:
        """`closing` is called when all is over, `linger` seconds after the end if the peers have
        not said goodbye before: what they still send then finds nobody. It is given the seconds
        that they may take to end their streams, none after a failure.
        """
        super().__init__(rank)
        self.work: PeerWork | None = None
        """What the peers say of their work, where they do."""
        self._start_deadline = 0.0
        self._stopped = StoppedProcesses()
        self._closing = closing
        self._linger = linger
        self._carrier = carrier
        self._publication = Publication(rank)
        self._readers: dict[int, wire.DirectoryReader] = {}
        self._peers: dict[int, _Peer] = {}
        self._met: set[int] = set()
        """Peers that know this rank."""
        self._groups: dict[GroupKey, MessageGroup] = {}
        self._channels: dict[tuple[int, int, int], _PushChannel] = {}
        """By reading rank, key of the notices, and reader."""
        self.receivers: dict[int, Callable[[int, bytes], None]] = {}
        """What takes frames of kinds that this link does not know, by kind."""
        self.changed = threading.Condition()
        self._open = False
        self._failed_at = 0.0

    # --- memory ---------------------------------------------------------------------------------

    def allocate(self, block: int, nbytes: int, shared: bool, purpose: str = "") -> Buffer:
        """See `Link.allocate`."""
        buffer = private_buffer(nbytes)
        self.adopt(block, buffer)
        return buffer

    def adopt(self, block: int, buffer: Buffer) -> None:
        """Use memory that another link has allocated."""
        self._buffers[block] = buffer

    def record(self, rank: int, name: str) -> str | None:
        """See `Link.record`."""
        return self._peers[rank].directory.records.get(name)

    def peer_slots(self, rank: int, region: int) -> Slots | None:
        """See `Link.peer_slots`."""
        if rank == self.rank:
            return self._own_slots(region)
        peer = self._peers.get(rank)
        return None if peer is None else self._receive_buffer(peer, region)

    def _receive_buffer(self, peer: _Peer, key: int) -> Slots | None:
        """The receive buffer of a peer's region, made when it is first needed."""
        with self.changed:
            known = peer.buffers.get(key)
            region = peer.directory.regions.get(key)
            if known is not None or region is None or self._closed:
                return known
            needed = region.used * region.count
            available = host_wire.available_bytes() if needed > wire.CHUNK_BYTES else needed
            if needed > available:
                raise TransportError(
                    "there is no memory for what comes from another rank",
                    rank=self.rank,
                    got=f"{needed} bytes for register {format_id(key)}",
                    expected=f"at most {available} bytes, which are free",
                )
            tight = replace(region, offset=0, stride=region.used)
            peer.buffers[key] = tight.slots(private_buffer(needed))
            return peer.buffers[key]

    # --- whether peers work ---------------------------------------------------------------------

    def join(self, publication: Publication, sink: Sink, start_deadline: float) -> None:
        """Begin to exchange frames with peers that have `start_deadline` seconds to come, and to
        tell each other of work, so that waits know who works.
        """
        work = self.work = PeerWork(self.rank, publication.peers, self._send_work)
        self.receivers[wire.WORK] = lambda rank, frame: work.receive(rank, frame[1:])
        self._start_deadline = start_deadline
        self.open(publication, sink)
        work.introduce()

    def _send_work(self, peer: int, note: bytes) -> None:
        if peer not in self.gone:
            self._carrier.send(peer, Frame(bytes([wire.WORK]) + note))

    def work_of(self, rank: int) -> Progress | None:
        """See `PeerFailures.work_of`."""
        return None if self.work is None else self.work.work_of(rank)

    def patience(self, deadline: float) -> Patience:
        """See `PeerFailures.patience`."""
        if self.work is None:
            return super().patience(deadline)
        unseen = if_unseen(deadline)
        if not all(map(self.work.is_known, self._publication.peers)):
            unseen = max(unseen, self._start_deadline)
        return Patience(deadline, self.work_of, unseen=unseen)

    def look_at(self, patience: Patience, ranks: list[int], label: object) -> bool:
        """See `PeerFailures.look_at`."""
        work = self.work
        if work is None:
            return super().look_at(patience, ranks, label)
        work.wait(ranks)
        behind = work.behind(ranks)
        processes = work.processes(behind)
        status = self._stopped.look(processes)
        if status is not None:
            end_stopped_at_exit(status.pid)
            raise stopped_rank(label, processes[status.pid], status)
        work.ask(behind, patience)
        return patience.is_over(behind)

    # --- connecting to the peers ----------------------------------------------------------------

    def connect(self, publication: Publication, sink: Sink, deadline: float) -> None:
        """See `Link.connect`."""
        self._deadline = deadline
        self._regions = {region.key: region for region in publication.regions}
        self._readers = {peer: wire.DirectoryReader(self.rank) for peer in publication.peers}
        self.open(publication, sink)
        for rank in publication.peers:
            for part in wire.pack_directory(publication, rank):
                self._carrier.send(rank, Frame(part))
        self._await_peers(deadline)
        if self.failure is not None:
            raise self.abort_error()
        missing = self._strangers()
        if missing:
            places = ", ".join(self._carrier.where(rank) for rank in missing)
            raise peers_not_ready(
                self.rank,
                publication.peers,
                missing,
                deadline,
                f" at {places}",
                "look at these ranks' own messages, and whether this host reaches them",
            )
        for rank, peer in self._peers.items():
            check_groups(publication, rank, peer.directory.groups)

    def open(self, publication: Publication, sink: Sink) -> None:
        """Begin to exchange frames, before the peers are there; `send` is all that then works."""
        self._sink = sink
        self._publication = publication
        self._open = True
        self._carrier.open(publication.peers, self)

    def send(self, rank: int, frame: bytes) -> None:
        """Send a frame of a kind that peers have a receiver for, some time soon."""
        self._carrier.send(rank, Frame(frame, sent=None if self.work is None else self.work.move))

    def _await_peers(self, seconds: float) -> None:
        """Return when all have introduced themselves, or no longer need to."""
        end = time.monotonic() + seconds
        while (rest := end - time.monotonic()) > 0:
            with self.changed:
                met = self.changed.wait_for(
                    lambda: self.failure is not None or not self._strangers(),
                    min(rest, REACH_INTERVAL_SECONDS),
                )
            if met:
                return
            for rank in self._strangers():
                error = self._carrier.connect_error(rank, rank in self._peers)
                if error is not None:
                    raise error

    def _strangers(self) -> list[int]:
        """Peers that are not known here, or do not know this rank."""
        known = self._peers.keys() & self._met
        return [peer for peer in self._publication.peers if peer not in known]

    def _introduce(self, rank: int, frame: bytes) -> None:
        """A part of a peer's directory came."""
        directory = None if rank in self._peers else self._readers[rank].add(frame)
        if directory is None:
            return
        for read in directory.reads:
            self._channels[rank, read.announced, read.reader] = self._channel(rank, read)
        with self.changed:
            self._peers[rank] = _Peer(directory)
            self.changed.notify_all()
        self._carrier.send(rank, Frame(bytes([wire.MET])))

    def _channel(self, rank: int, read: Read) -> _PushChannel:
        own = self._regions.get(read.region)
        if own is None or own.announced != read.announced:
            raise TransportError(
                f"rank {rank} reads a register that this rank does not publish",
                rank=self.rank,
                got=f"register {format_id(read.region)}",
                hint="compile all ranks' plans from one job",
            )
        inside = len(read.box) == len(own.shape) and all(
            start <= stop <= extent
            for (start, stop), extent in zip(read.box, own.shape, strict=True)
        )
        if not inside:
            raise TransportError(
                f"rank {rank} reads a box that register {own.name!r} does not have",
                rank=self.rank,
                got=str(read.box),
                expected=f"a box of {list(own.shape)}",
            )
        pushes = [self.push(rank, own.key, slot, read.box) for slot in range(own.count)]
        return _PushChannel(pushes, own.first_version)

    # --- data and messages ----------------------------------------------------------------------

    def push(
        self, rank: int, region: int, slot: int, box: Region, flat: bool = False
    ) -> Callable[[], object]:
        """See `Link.push`."""
        own = self._regions[region]
        array = own.slots(self._buffers.get(own.block))[slot]
        if flat:
            array = array.reshape(-1)
        frames = [
            Frame(wire.pack_data(own.key, slot, part, flat), array[region_index(part)])
            for part in wire.cut_region(box, own.dtype.itemsize)
        ]
        return partial(self._send_all, rank, frames)

    def _send_all(self, rank: int, frames: Sequence[Frame]) -> None:
        for frame in frames:
            self._carrier.send(rank, frame)

    def notify(self, notice: Notice) -> None:
        """See `Link.notify`."""
        if notice.kind == ARRIVED:
            channel = self._channels.get((notice.rank, notice.register, notice.task))
            if channel is not None:
                channel.push()
        packet = host_wire.pack_notice(notice.kind, notice.register, notice.task)
        self._carrier.send(notice.rank, Frame(packet))

    def tell(self, rank: int, note: bytes) -> None:
        """See `Link.tell`."""
        if not self._closed:
            self._carrier.send(rank, Frame(bytes([wire.NOTE]) + note))

    def receive(self, rank: int, frame: bytes) -> bool:
        """See `Receiver.receive`."""
        kind = frame[0] if frame else 0
        sink = self._sink
        if kind == wire.GOODBYE:
            with self.changed:
                self.gone.add(rank)
                self.changed.notify_all()
            return False
        if self._closed or sink is None:
            # It may still say something; nobody listens any more.
            return kind != wire.ABORT
        try:
            return self._dispatch(rank, kind, frame, sink)
        except PlanCompilerError as error:
            self._lose(rank, not_understood(rank, error))
            return False

    def _dispatch(self, rank: int, kind: int, frame: bytes, sink: Sink) -> bool:
        if kind == wire.ABORT:
            return self._take(rank, kind, frame, sink)
        receive = self.receivers.get(kind)
        if receive is not None:
            receive(rank, frame)
            return True
        if kind == wire.DIRECTORY and rank in self._readers:
            self._introduce(rank, frame)
            return True
        if kind == wire.MET and rank in self._readers:
            with self.changed:
                self._met.add(rank)
                self.changed.notify_all()
            return True
        peer = self._peers.get(rank)
        if peer is None:
            raise WireFormatError(f"rank {rank} began before it introduced itself", rank=rank)
        if kind == wire.DATA:
            header = wire.unpack_data(frame)
            slots = self._receive_buffer(peer, header.region)
            if slots is None and not self._closed:
                raise WireFormatError(f"rank {rank} sent data of no register", rank=rank)
            if slots is not None:
                wire.store_data(frame, header, slots)
        elif kind == wire.BARRIER:
            group, count = wire.unpack_barrier(frame)
            if group >= len(peer.keys):
                raise WireFormatError(f"rank {rank} came to the barrier of no group", rank=rank)
            with self.changed:
                peer.counts[peer.keys[group]] = count
                self.changed.notify_all()
        else:
            return self._take(rank, kind, frame, sink)
        return True

    def lost(self, rank: int, reason: str) -> None:
        """See `Receiver.lost`."""
        if self._closed or rank in self.gone or self.failure is not None:
            return
        self._lose(
            rank,
            TransportError(
                f"rank {rank} went away",
                rank=rank,
                got=reason,
                hint="look at its own messages: its process ended or stands still, or its host is "
                "cut off",
            ),
        )

    # --- groups, failure, end -------------------------------------------------------------------

    def group(self, key: GroupKey) -> MessageGroup:
        """See `Link.group`."""
        if key not in self._groups:
            keys = [known for known, _ in self._publication.groups]
            self._groups[key] = MessageGroup(self, key, keys.index(key))
        return self._groups[key]

    def send_barrier(self, ranks: Sequence[int], group: int, count: int) -> None:
        """Tell those of the ranks that are peers that this one has come to a barrier."""
        frame = Frame(wire.pack_barrier(group, count))
        for rank in ranks:
            if rank in self._peers:
                self._carrier.send(rank, frame)

    def missing(self, key: GroupKey, count: int) -> list[int]:
        """Peers in a group that have come less often."""
        peers = self._peers
        return [rank for rank in key.ranks if rank in peers and peers[rank].counts[key] < count]

    def wait_for(self, key: GroupKey, count: int, label: object) -> None:
        """Return when all peers in a group have come as often; see `Group.barrier`."""
        deadline = self._deadline if self._watcher is None else None
        with self.changed:
            self.await_members(
                self.changed, key.ranks, lambda: self.missing(key, count), label, deadline
            )

    def abort(self, failed_rank: int, error: PlanCompilerError) -> None:
        """See `Link.abort`."""
        with self.changed:
            if self.failure is not None:
                return
            self.failure = failed_rank, error
            self._failed_at = time.monotonic()
            self.changed.notify_all()
        if self._open:
            frame = Frame(host_wire.pack_abort(failed_rank, error))
            for rank in self._publication.peers:
                self._carrier.send(rank, frame)

    def close(self) -> None:
        """See `Link.close`."""
        with self.changed:
            if self._closed:
                return
            self._closed = True
        if self._open:
            if self.failure is None:
                last = Frame(bytes([wire.GOODBYE]))
                # Peers that have said goodbye themselves lose nothing without this one.
                are_gone = self.gone.issuperset(self._publication.peers)
                seconds = FAILED_SECONDS if are_gone else CLOSE_SECONDS
            else:
                last = Frame(host_wire.pack_abort(*self.failure))
                seconds = max(0.0, self._failed_at + FAILED_SECONDS - time.monotonic())
            self._carrier.close(last, self.failure is not None, seconds)
        with self.changed:
            self.changed.wait_for(
                lambda: self.failure is not None or self.gone.issuperset(self._publication.peers),
                self._linger,
            )
            self._sink = None
            self._watcher = None
            for peer in self._peers.values():
                peer.buffers.clear()
            self._channels.clear()
            self._buffers.clear()
            self._groups.clear()
        if self._closing is not None:
            self._closing(self._linger if self.failure is None else 0.0)
