"""`host` link: a process per rank on one host, over shared memory and Unix sockets.

Data never goes through a socket: peers map each other's shared blocks and read registers there.
Barriers are counters in shared memory; notices and failures are small packets.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence

from plancompiler.errors import (
    DeviceError,
    PlanCompilerError,
    TransportError,
    WireFormatError,
)
from plancompiler.executor.actor import Notice
from plancompiler.executor.comm import host_wire as wire
from plancompiler.executor.comm.link import GroupKey, Publication, Sink, check_groups
from plancompiler.executor.comm.patience import LONGEST_LOOK, Patience, Progress, work_of_process
from plancompiler.executor.comm.peer_failures import (
    left_barrier,
    missed_barrier,
    not_understood,
    peers_not_ready,
    stopped_rank,
)
from plancompiler.executor.comm.process_link import ProcessLink
from plancompiler.executor.memory import Buffer, Slots, private_buffer
from plancompiler.executor.process_status import StoppedProcesses, end_stopped_at_exit

YIELDS = 200
"""Rounds in which a waiting rank only yields the processor: peers often come in microseconds."""
FIRST_SLEEP = 5e-6
LAST_SLEEP = 1e-3
LONG_SLEEP = 20e-3
"""Seconds; afterwards it sleeps, longer and longer, so that a slow peer costs nothing: up to the
last, and when it has waited for a hundred times that long, up to the long one.
"""
SLEEP_GROWTH = 1.2

_CONNECT_PAUSE = 0.01
_ABORT_CHECK = 0.1
"""Seconds between looks at the abort flag while the ranks meet."""
_WORDS_PER_LINE = 8
"""A cache line of 64-bit words, so that counters of two groups never share one."""


def _fence(lock: threading.Lock) -> None:
    """Make earlier writes visible before later ones, on every processor.

    Taking and releasing a lock twice orders all accesses around it; Python has no fence of its own.
    """
    with lock:
        pass
    with lock:
        pass


class HostGroup:
    """Barriers of one group: each member counts up in its own line, and reads the others'.

    Of the group's members only those that the transport has as peers are waited for.
    """

    def __init__(
        self,
        link: HostLink,
        key: GroupKey,
        own: memoryview,
        peers: list[tuple[int, memoryview]],
        deadline: float,
    ) -> None:
        self.ranks = key.ranks
        self.member = key.ranks.index(link.rank)
        self._link = link
        self._own = own
        self.deadline = deadline
        """Seconds that a wait may take."""
        self._peers = peers
        self._count = 0
        self._lock = threading.Lock()

    def barrier(self, label: object) -> None:
        """See `Group.barrier`."""
        self._count = target = self._count + 1
        _fence(self._lock)
        self._own[0] = target
        for rank, line in self._peers:
            if line[0] < target:
                self._wait(line, target, rank, label)
        _fence(self._lock)

    def missing(self) -> list[int]:
        """See `Group.missing`; members on this host."""
        return [peer for peer, line in self._peers if line[0] < self._count]

    def _wait(self, line: memoryview, target: int, rank: int, label: object) -> None:
        for _ in range(YIELDS):
            os.sched_yield()
            if line[0] >= target:
                return
        link = self._link
        wait: PeerWait | None = None
        pause, longest = FIRST_SLEEP, LAST_SLEEP
        begin = time.monotonic()
        while line[0] < target:
            if link.failure is not None:
                raise link.abort_error()
            # A member that said goodbye did so after its last count.
            if rank in link.gone and line[0] < target:
                raise left_barrier(label, self.ranks, rank)
            time.sleep(pause)
            pause = min(pause * SLEEP_GROWTH, longest)
            if pause == longest:
                longest = min(max(LAST_SLEEP, (time.monotonic() - begin) / 100), LONG_SLEEP)
                if not link.watched:
                    wait = wait or PeerWait(link, self.deadline)
                    missing = self.missing()
                    if missing and wait.is_over(label, missing):
                        raise missed_barrier(label, self.ranks, missing, self.deadline)


class PeerWait:
    """One wait for ranks of this host: whether they run, and work."""

    def __init__(self, link: HostLink, deadline: float) -> None:
        self._link = link
        self._patience = Patience(deadline, link.work_of)
        self._stopped = StoppedProcesses()
        self._look_at = time.monotonic() + self._patience.pause

    def is_over(self, label: object, missing: list[int]) -> bool:
        """Whether all that are missing have stood still for the deadline. DeadlineError where one
        is stopped by a signal.
        """
        now = time.monotonic()
        if now < self._look_at:
            return False
        self._look_at = now + self._patience.pause
        self._link.check_running(self._stopped, label, missing)
        return self._patience.is_over(missing)


class HostLink(ProcessLink):
    """One rank's connection to the other processes of its host.

    `token` is the run's secret, made by whoever starts the ranks and given to each of them. `find`
    gives the processes of a rank that has not come yet. With it this rank looks whether those that
    it waits for run; without, somebody else does.
    """

    def __init__(
        self, token: str, rank: int, find: Callable[[int], Sequence[int]] | None = None
    ) -> None:
        if sys.platform != "linux":
            raise DeviceError(
                "the host transport needs Linux", got=sys.platform, hint="use the local transport"
            )
        super().__init__(rank)
        self._token = token
        self._find = find
        self._processes: dict[int, int] = {}
        """Process ids of the ranks that this one has met."""
        self._seen: set[int] = set()
        """Ranks of which a process was found."""
        self._stopped = StoppedProcesses()
        self._look_at = 0.0
        self._lock = threading.Lock()
        self._shared: dict[int, wire.SharedMemory] = {}
        self._peers: dict[int, wire.PeerMemory] = {}
        self._connections: dict[int, socket.socket] = {}
        self._counters: memoryview | None = None
        self._lines: dict[GroupKey, int] = {}
        self._groups: dict[GroupKey, HostGroup] = {}
        self._receiver: threading.Thread | None = None
        self._wake_receiver = -1

    # --- memory ---------------------------------------------------------------------------------

    def near(self, ranks: Collection[int]) -> tuple[int, ...]:
        """See `Link.near`."""
        return tuple(sorted(ranks))

    def allocate(self, block: int, nbytes: int, shared: bool, purpose: str = "") -> Buffer:
        """See `Link.allocate`."""
        if shared:
            memory = wire.SharedMemory(f"{purpose}-{self.rank}", nbytes)
            self._shared[block] = memory
            self._buffers[block] = memory.buffer()
        else:
            self._buffers[block] = private_buffer(nbytes)
        return self._buffers[block]

    def record(self, rank: int, name: str) -> str | None:
        """See `Link.record`."""
        return self._peers[rank].records.get(name)

    def peer_slots(self, rank: int, region: int) -> Slots | None:
        """See `Link.peer_slots`."""
        if rank != self.rank:
            peer = self._peers.get(rank)
            return None if peer is None else peer.slots(region)
        return self._own_slots(region)

    def free(self, rank: int, region: int) -> None:
        """See `Link.free`."""
        if rank != self.rank:
            self._peers[rank].free(region)
        elif region in self._regions:
            del self._shared[self._regions[region].block]
            super().free(rank, region)

    # --- connecting to the peers -----------------------------------------------------------------

    def connect(self, publication: Publication, sink: Sink, deadline: float) -> None:
        """See `Link.connect`."""
        self._deadline = deadline
        self._sink = sink
        for region in publication.regions:
            if region.stride and region.block not in self._shared:
                raise TransportError(
                    f"register {region.name!r} is read by other ranks, but its block is private",
                    rank=self.rank,
                    got=f"block {region.block}",
                    expected="a shared block",
                )
            self._regions[region.key] = region
        if len(self._shared) > wire.MAX_SHARED_BLOCKS:
            raise TransportError(
                "the plan has too many shared blocks",
                rank=self.rank,
                got=len(self._shared),
                expected=f"at most {wire.MAX_SHARED_BLOCKS}",
            )
        text = wire.pack_directory(publication, list(self._shared))
        directory = wire.SharedMemory(f"directory-{self.rank}", len(text))
        directory.buffer()[:] = bytearray(text)
        lines = len(publication.groups) + 1
        counters = wire.SharedMemory(f"counters-{self.rank}", lines * _WORDS_PER_LINE * 8)
        self._counters = memoryview(counters.map).cast("Q")
        self._lines = {key: line for line, (key, _) in enumerate(publication.groups)}
        memories = [directory, counters, *self._shared.values()]
        try:
            self._meet(publication, [memory.descriptor for memory in memories])
        finally:
            for memory in memories:
                memory.close_descriptor()
        for peer, memory_of_peer in self._peers.items():
            check_groups(publication, peer, memory_of_peer.groups)
        self._start_receiver()

    def _meet(self, publication: Publication, descriptors: list[int]) -> None:
        """Connect to lower ranks and accept higher ones, so that each pair has one connection."""
        end = time.monotonic() + self._deadline
        higher = {peer for peer in publication.peers if peer > self.rank}
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            if higher:
                try:
                    listener.bind(wire.socket_name(self._token, self.rank))
                except OSError as error:
                    raise TransportError(
                        "a rank was started twice, or its address is taken",
                        rank=self.rank,
                        got=error.strerror,
                    ) from error
                listener.listen(len(higher) + 8)
            for peer in publication.peers:
                if peer < self.rank:
                    connection = self._reach(peer, publication, end)
                    self._greet(connection, descriptors, peer, publication, end)
            listener.settimeout(_ABORT_CHECK)
            while not higher <= self._connections.keys():
                self._check_bootstrap(publication, end)
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    continue
                self._greet(connection, descriptors, None, publication, end)

    def _reach(self, peer: int, publication: Publication, end: float) -> socket.socket:
        """A connection to a rank that may not be listening yet."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        while True:
            try:
                connection.connect(wire.socket_name(self._token, peer))
                return connection
            except (ConnectionRefusedError, BlockingIOError):
                try:
                    self._check_bootstrap(publication, end)
                except PlanCompilerError:
                    connection.close()
                    raise
                time.sleep(_CONNECT_PAUSE)
            except OSError:
                connection.close()
                raise

    def _greet(
        self,
        connection: socket.socket,
        descriptors: list[int],
        expected: int | None,
        publication: Publication,
        end: float,
    ) -> None:
        """Exchange greetings. `expected` is the rank that was called, None for a caller."""
        try:
            wire.check_same_user(connection)
            if expected is not None:
                wire.send_hello(connection, self._token, self.rank, descriptors)
            connection.settimeout(_ABORT_CHECK)
            while True:
                try:
                    rank, received = wire.receive_hello(connection, self._token)
                    break
                except TimeoutError:
                    self._check_bootstrap(publication, end)
            try:
                unknown = rank not in publication.peers or rank in self._connections
                if unknown or (rank < self.rank if expected is None else rank != expected):
                    raise TransportError(
                        "a rank that this one has no business with greeted it",
                        rank=self.rank,
                        got=f"rank {rank}",
                        expected=f"ranks {list(publication.peers)}",
                    )
                if expected is None:
                    wire.send_hello(connection, self._token, self.rank, descriptors)
                self._peers[rank] = wire.PeerMemory(rank, received)
            finally:
                wire.close_descriptors(received)
        except (OSError, TransportError) as error:
            connection.close()
            # A stranger that knocks is sent away; a peer that was called must answer well.
            if expected is None:
                return
            if isinstance(error, OSError):
                raise TransportError(
                    f"rank {expected} broke off while the ranks met", rank=expected, got=error
                ) from error
            raise
        except BaseException:
            connection.close()
            raise
        connection.settimeout(None)
        seconds = int(self._deadline)
        timeout = struct.pack("@ll", seconds, int((self._deadline - seconds) * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        self._connections[rank] = connection
        self._processes[rank] = wire.process_of(connection)

    def _check_bootstrap(self, publication: Publication, end: float) -> None:
        if self.failure is not None:
            raise self.abort_error()
        if time.monotonic() > end:
            missing = [peer for peer in publication.peers if peer not in self._connections]
            raise peers_not_ready(self.rank, publication.peers, missing, self._deadline)
        if time.monotonic() > self._look_at:
            self._look_at = time.monotonic() + LONGEST_LOOK
            self.check_running(self._stopped, "connecting to the other ranks", publication.peers)

    # --- the processes of peers -----------------------------------------------------------------

    def process_of(self, rank: int) -> int | None:
        """See `Link.process_of`."""
        return self._processes.get(rank)

    def work_of(self, rank: int) -> Progress | None:
        """See `PeerFailures.work_of`."""
        process = self._processes.get(rank)
        return None if process is None else work_of_process(process)

    def check_running(self, stopped: StoppedProcesses, label: object, ranks: Iterable[int]) -> None:
        """DeadlineError where a signal has stopped the process of one of these ranks,
        TransportError where one has ended that has not been met.
        """
        processes: dict[int, int] = {}
        if self._find is None:
            return
        for rank in ranks:
            if rank in self._processes:
                processes[self._processes[rank]] = rank
            else:
                unmet = self._find(rank)
                if rank in self._seen and not unmet:
                    raise TransportError(
                        f"{label}: the process of rank {rank} ended before it came",
                        rank=rank,
                        hint="look at its own messages",
                    )
                if unmet:
                    self._seen.add(rank)
                processes |= dict.fromkeys(unmet, rank)
        status = stopped.look(processes)
        if status is not None:
            end_stopped_at_exit(status.pid)
            raise stopped_rank(label, processes[status.pid], status)

    # --- messages -------------------------------------------------------------------------------

    @property
    def watched(self) -> bool:
        """Whether somebody watches over this rank's waits."""
        return self._watcher is not None

    def tell(self, rank: int, note: bytes) -> None:
        """See `Link.tell`."""
        connection = self._connections.get(rank)
        if connection is not None and len(note) < wire.MAX_PACKET:
            with contextlib.suppress(OSError):
                connection.send(bytes([wire.NOTE]) + note, socket.MSG_DONTWAIT)

    def notify(self, notice: Notice) -> None:
        """See `Link.notify`."""
        packet = wire.pack_notice(notice.kind, notice.register, notice.task)
        try:
            self._connections[notice.rank].send(packet)
        except BlockingIOError:
            raise TransportError(
                f"rank {notice.rank} has not taken its messages for {self._deadline:g} s",
                rank=notice.rank,
            ) from None
        except OSError as error:
            # A peer that said goodbye wants nothing back; a lost one is reported by the receiver.
            if notice.rank not in self.gone:
                raise TransportError(
                    f"rank {notice.rank} went away", rank=notice.rank, got=error.strerror
                ) from error

    def _start_receiver(self) -> None:
        if not self._connections:
            return
        self._wake_receiver = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._receiver = threading.Thread(
            target=self._receive, name=f"plancompiler-receive-{self.rank}"
        )
        self._receiver.start()

    def _receive(self) -> None:
        """Dispatch packets until woken for closing, or until all peers are gone."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_receiver, selectors.EVENT_READ)
            for rank, connection in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, rank)
            while True:
                for key, _ in selector.select():
                    if key.data is None:
                        return
                    try:
                        alive = self._receive_from(key.data)
                    except PlanCompilerError as error:
                        self._lose(key.data, not_understood(key.data, error))
                        # Nothing more is wanted from it, and it should know.
                        with contextlib.suppress(OSError):
                            self._connections[key.data].shutdown(socket.SHUT_RDWR)
                        alive = False
                    if not alive:
                        selector.unregister(key.fileobj)

    def _receive_from(self, rank: int) -> bool:
        """Take one packet; False when the peer will send no more."""
        try:
            packet, _, flags, _ = self._connections[rank].recvmsg(wire.MAX_PACKET)
        except ConnectionResetError:
            # The peer closed before it had read everything. What it sent can still be read next.
            return True
        except OSError as error:
            packet, flags = b"", 0
            reason: str | None = error.strerror
        else:
            reason = None
        if not packet:
            if rank in self.gone:
                return False
            raise TransportError(
                f"rank {rank} went away",
                rank=rank,
                got=reason,
                hint="its process ended; look at its own messages",
            )
        if flags & socket.MSG_TRUNC:
            raise WireFormatError(f"rank {rank} sent a packet that is too large", rank=rank)
        sink = self._sink
        if sink is None:
            return False
        if packet[0] == wire.GOODBYE:
            self.gone.add(rank)
            return True
        return self._take(rank, packet[0], packet, sink)

    # --- groups, failure, end -------------------------------------------------------------------

    def group(self, key: GroupKey) -> HostGroup:
        """See `Link.group`."""
        if key not in self._groups:
            self._groups[key] = self._make_group(key)
        return self._groups[key]

    def _make_group(self, key: GroupKey) -> HostGroup:
        counters = self._counters
        if counters is None:
            raise TransportError("a group was asked for before the ranks met", rank=self.rank)
        line = self._lines[key] * _WORDS_PER_LINE
        own = counters[line : line + 1]
        peers = []
        for rank in key.ranks:
            if rank in self._peers:
                peer = self._peers[rank]
                at = next(at for at, (other, _) in enumerate(peer.groups) if other == key)
                position = at * _WORDS_PER_LINE
                peers.append((rank, peer.counters[position : position + 1]))
        return HostGroup(self, key, own, peers, self._deadline)

    def abort(self, failed_rank: int, error: PlanCompilerError) -> None:
        """See `Link.abort`."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = failed_rank, error
        packet = wire.pack_abort(failed_rank, error)
        for rank, connection in list(self._connections.items()):
            if rank != failed_rank:
                with contextlib.suppress(OSError):
                    connection.send(packet, socket.MSG_DONTWAIT)

    def close(self) -> None:
        """See `Link.close`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self.failure is None:
            for connection in self._connections.values():
                with contextlib.suppress(OSError):
                    connection.send(bytes([wire.GOODBYE]))
        if self._receiver is not None:
            os.eventfd_write(self._wake_receiver, 1)
            if self._receiver is not threading.current_thread():
                self._receiver.join()
            os.close(self._wake_receiver)
            self._wake_receiver = -1
        for connection in self._connections.values():
            connection.close()
        for memory in self._shared.values():
            memory.close_descriptor()
        self._connections.clear()
        self._peers.clear()
        self._buffers.clear()
        self._groups.clear()
        self._shared.clear()
        self._counters = None
        self._sink = None
        self._watcher = None
