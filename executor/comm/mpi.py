"""`mpi` link: frames as MPI messages between the processes that one `mpiexec` has started.

One thread of a process makes all MPI calls, for all runs of the process: MPI has to be asked for
what came, and a thread that asks as often as something comes, and else ever more rarely, costs
nothing while a rank waits. Messages of a run have its tag and, as over gRPC, their check. Where a
process dies, MPI ends all.
"""

from __future__ import annotations

import importlib
import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from plancompiler.errors import DeviceError, TransportError, WireFormatError
from plancompiler.executor.comm import remote_wire as wire
from plancompiler.executor.comm.messages import Frame, MessageLink, Receiver
from plancompiler.executor.threads import await_threads
from plancompiler.limits import time_limits

EAGER_ROUNDS = 100
"""Rounds without news in which MPI is asked again at once."""
FIRST_PAUSE = 20e-6
LAST_PAUSE, LONG_PAUSE = 1e-3, 20e-3
"""Seconds between later rounds: longer and longer, up to the last, and when nothing has come for a
hundred times that long, up to the long one, so that who only waits does not seem to work.
"""
PAUSE_GROWTH = 1.2
IN_FLIGHT = 16
"""Messages that MPI is given before it has sent them."""
MAX_EARLY = 4096
"""Messages kept for runs that this process does not know yet: parts of directories."""
JOIN_SECONDS = time_limits.MPI_END


class _Outgoing(NamedTuple):
    carrier: MpiCarrier
    rank: int
    frame: Frame


class _Run(NamedTuple):
    receiver: Receiver
    processes: Sequence[int]


class MpiWorld:
    """This process's part in MPI's world. Make one, and close it at the end."""

    def __init__(self) -> None:
        """Raises DeviceError where MPI is missing."""
        try:
            self._mpi: Any = importlib.import_module("mpi4py.MPI")
        except (ImportError, RuntimeError) as error:
            raise DeviceError(
                "MPI cannot be used here", got=str(error), hint="pip install plancompiler[mpi]"
            ) from error
        if self._mpi.Query_thread() < self._mpi.THREAD_SERIALIZED:
            raise DeviceError("this MPI can be used from the main thread only")
        self.comm: Any = self._mpi.COMM_WORLD.Dup()
        self.rank: int = self.comm.Get_rank()
        self.size: int = self.comm.Get_size()
        self._tags: int = self.comm.Get_attr(self._mpi.TAG_UB)
        self._lock = threading.Lock()
        self._runs: dict[int, _Run] = {}
        """By tag."""
        self._past: set[int] = set()
        self._failure = ""
        self._places: defaultdict[tuple[int, int], int] = defaultdict(int)
        """By tag and rank: how many messages have come."""
        self._early: deque[tuple[int, int, int, bytearray]] = deque()
        """Tag, rank, place and frame of messages for runs yet to come."""
        self._outbox: queue.SimpleQueue[_Outgoing | None] = queue.SimpleQueue()
        self._closing = False
        self._thread = threading.Thread(target=self._progress, name="plancompiler-mpi")
        self._thread.start()

    def link(
        self,
        token: str,
        closing: Callable[[float], object] | None = None,
        linger: float = 0.0,
        processes: Sequence[int] | None = None,
    ) -> MessageLink:
        """This rank's link for one run; `token` is the run's secret.

        `processes` are MPI's ranks by rank of the run, where these are not the same.
        """
        processes = range(self.size) if processes is None else processes
        carrier = MpiCarrier(self, token, processes)
        return MessageLink(processes.index(self.rank), carrier, closing, linger)

    def tag(self, token: str) -> int:
        """The tag of a run."""
        return int.from_bytes(wire.run_name(token)[:8], "little") % self._tags

    def attach(self, tag: int, receiver: Receiver, processes: Sequence[int]) -> None:
        """Hand over what comes for a run, and what has come already."""
        with self._lock:
            if self._failure:
                raise TransportError("MPI has failed", got=self._failure)
            if tag in self._runs or tag in self._past:
                raise TransportError("a rank was started twice", rank=receiver.rank)
            self._runs[tag] = _Run(receiver, processes)
        self._outbox.put(None)

    def detach(self, tag: int) -> None:
        """Drop what still comes for a run."""
        with self._lock:
            self._runs.pop(tag, None)
            self._past.add(tag)
            for key in [key for key in self._places if key[0] == tag]:
                del self._places[key]

    def send(self, carrier: MpiCarrier, rank: int, frame: Frame) -> None:
        """Send some time soon."""
        self._outbox.put(_Outgoing(carrier, rank, frame))

    def close(self) -> None:
        """Stop. MPI itself ends with the process, when all others end too."""
        self._closing = True
        self._outbox.put(None)
        await_threads([self._thread], JOIN_SECONDS)

    # --- the thread -------------------------------------------------------------------------------

    def _progress(self) -> None:
        try:
            self._talk()
        except Exception as error:  # a fault of MPI or here: nothing comes any more
            with self._lock:
                self._failure = f"{type(error).__name__}: {error}"
                receivers = [run.receiver for run in self._runs.values()]
            for receiver in receivers:
                receiver.lost(receiver.rank, self._failure)

    def _talk(self) -> None:
        flying: list[tuple[_Outgoing, Any]] = []
        idle = 0
        pause = FIRST_PAUSE
        heard = time.monotonic()
        while not (self._closing and not flying):
            news = self._deliver_early()
            news |= self._receive()
            news |= self._finish_sends(flying)
            idle = 0 if news else idle + 1
            if news:
                pause, heard = FIRST_PAUSE, time.monotonic()
            try:
                if len(flying) >= IN_FLIGHT:
                    raise queue.Empty
                if idle < EAGER_ROUNDS:
                    message = self._outbox.get_nowait()
                else:
                    message = self._outbox.get(timeout=pause)
                    pause = FIRST_PAUSE
            except queue.Empty:
                if idle >= EAGER_ROUNDS:
                    longest = min(max(LAST_PAUSE, (time.monotonic() - heard) / 100), LONG_PAUSE)
                    pause = min(pause * PAUSE_GROWTH, longest)
                continue
            idle = 0
            if message is not None:
                self._start_send(message, flying)

    def _start_send(self, message: _Outgoing, flying: list[tuple[_Outgoing, Any]]) -> None:
        carrier, rank, frame = message
        data = wire.with_check(frame.parts(), carrier.places[rank])
        carrier.places[rank] += 1
        request = self.comm.Isend(
            [data, self._mpi.BYTE], dest=carrier.processes[rank], tag=carrier.tag
        )
        flying.append((message, request))

    def _finish_sends(self, flying: list[tuple[_Outgoing, Any]]) -> bool:
        done = [each for each in flying if each[1].Test()]
        for each in done:
            flying.remove(each)
            each[0].carrier.sent(each[0].rank)
        return bool(done)

    def _receive(self) -> bool:
        status = self._mpi.Status()
        message = self.comm.Improbe(self._mpi.ANY_SOURCE, self._mpi.ANY_TAG, status)
        if message is None:
            return False
        rank, tag = status.Get_source(), status.Get_tag()
        size = status.Get_count(self._mpi.BYTE)
        if size > 2 * wire.CHUNK_BYTES:
            raise WireFormatError(f"rank {rank} sent a message that is too large", got=size)
        frame = bytearray(size)
        message.Recv([frame, self._mpi.BYTE])
        with self._lock:
            if tag in self._past:
                return True
            place = self._places[tag, rank]
            self._places[tag, rank] += 1
            run = self._runs.get(tag)
            # Where the run has just become known, the messages before this one come first.
            if run is None or any(tag == each[0] for each in self._early):
                if len(self._early) < MAX_EARLY:
                    self._early.append((tag, rank, place, frame))
                return True
        self._hand_over(run, rank, place, frame)
        return True

    def _hand_over(self, run: _Run, process: int, place: int, frame: bytearray) -> None:
        rank = run.processes.index(process)
        try:
            content = wire.without_check(frame, place)
        except WireFormatError as error:
            run.receiver.lost(rank, str(error))
        else:
            run.receiver.receive(rank, content)

    def _deliver_early(self) -> bool:
        if not self._early:
            return False
        with self._lock:
            known = [each for each in self._early if each[0] in self._runs]
            for each in known:
                self._early.remove(each)
            runs = dict(self._runs)
        for tag, rank, place, frame in known:
            self._hand_over(runs[tag], rank, place, frame)
        return bool(known)


class MpiCarrier:
    """Frames of one run."""

    def __init__(self, world: MpiWorld, token: str, processes: Sequence[int]) -> None:
        self.tag = world.tag(token)
        self.processes = processes
        """MPI's ranks by rank of the run."""
        self.places: defaultdict[int, int] = defaultdict(int)
        """Frames that were sent, by rank; the world's thread counts them."""
        self._world = world
        self._peers: tuple[int, ...] = ()
        self._waiting = 0
        """Frames that are not yet sent."""
        self._changed = threading.Condition()

    def open(self, peers: Sequence[int], receiver: Receiver) -> None:
        """See `Carrier.open`."""
        outside = [peer for peer in peers if peer >= len(self.processes)]
        if outside:
            raise TransportError(
                "a peer is not among the processes of this MPI run",
                rank=receiver.rank,
                got=f"ranks {outside}",
                expected=f"ranks 0 to {len(self.processes) - 1}",
            )
        self._peers = tuple(peers)
        self._world.attach(self.tag, receiver, self.processes)

    def send(self, rank: int, frame: Frame) -> None:
        """See `Carrier.send`."""
        with self._changed:
            self._waiting += 1
        self._world.send(self, rank, frame)

    def sent(self, rank: int) -> None:
        """A frame is on its way; called by the world's thread."""
        with self._changed:
            self._waiting -= 1
            self._changed.notify_all()

    def close(self, last: Frame, hurry: bool, seconds: float) -> None:
        """See `Carrier.close`."""
        for peer in self._peers:
            self.send(peer, last)
        with self._changed:
            self._changed.wait_for(lambda: self._waiting == 0, seconds)
        self._world.detach(self.tag)

    def connect_error(self, rank: int, is_known: bool) -> None:
        """See `Carrier.connect_error`."""

    def where(self, rank: int) -> str:
        """See `Carrier.where`."""
        return f"MPI rank {rank}"
