"""The payload of a step, counted on its way between ranks that share no memory."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

from plancompiler.errors import PlanCompilerError
from plancompiler.executor.comm.messages import Frame, MessageLink, Receiver
from plancompiler.executor.comm.remote_wire import DATA
from plancompiler.executor.runtime import Runtime
from plancompiler.ir.closing import Closing
from plancompiler.plan.plan import Plan


class CountedWorld(Closing):
    """All ranks of a job as threads of this process that send each other what they would read in
    memory that they shared. Whatever hosts they are on, ranks read the same bytes of each other.
    """

    def __init__(self, plans: Mapping[int, Plan]) -> None:
        self._wire = Wire()
        self._runtimes = {
            rank: Runtime(plan, MessageLink(rank, WireEnd(rank, self._wire)))
            for rank, plan in plans.items()
            if not plan.is_idle
        }
        self._pool = ThreadPoolExecutor(len(self._runtimes))
        try:
            self._on_all(Runtime.prepare)
        except BaseException:
            self.close()
            raise

    def payload_of_step(self) -> Counter[tuple[int, int]]:
        """Run one step; (from, to) → bytes of data that went between these ranks."""
        self._wire.payload.clear()
        self._on_all(lambda runtime: runtime.run(1))
        return Counter(self._wire.payload)

    def close(self) -> None:
        """Stop all ranks and free the memory."""
        try:
            self._on_all(Runtime.close)
        finally:
            self._pool.shutdown()
            self._wire.close()

    def _on_all(self, work: Callable[[Runtime], None]) -> None:
        """Do something on all ranks at once."""
        for _ in self._pool.map(work, self._runtimes.values()):
            pass


class Wire:
    """Carries frames between links of one process, in order for each pair. A thread for each rank
    hands over what comes, so that who sends waits for nobody.
    """

    def __init__(self) -> None:
        self.payload: Counter[tuple[int, int]] = Counter()
        """(from, to) → bytes of data that were handed over, without headers."""
        self._arriving: dict[int, SimpleQueue[tuple[int, bytes] | None]] = {}
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def attach(self, rank: int, receiver: Receiver) -> None:
        """Hand over to a rank what comes for it."""
        arriving = self._to(rank)

        def hand_over() -> None:
            while (arrived := arriving.get()) is not None:
                receiver.receive(*arrived)

        thread = threading.Thread(target=hand_over, name=f"plancompiler-wire-{rank}", daemon=True)
        thread.start()
        with self._lock:
            self._threads.append(thread)

    def carry(self, sender: int, rank: int, frame: Frame) -> None:
        """Bring a frame to a rank, which need not be there yet."""
        arriving = self._to(rank)
        # Under a lock, so that frames of several threads of a rank stay whole and in order.
        with self._lock:
            data = frame.encoded()
            if data[0] == DATA:
                self.payload[sender, rank] += len(data) - len(frame.header)
            arriving.put((sender, data))

    def close(self) -> None:
        """Hand over what is on its way, and stop."""
        for arriving in self._arriving.values():
            arriving.put(None)
        for thread in self._threads:
            thread.join()

    def _to(self, rank: int) -> SimpleQueue[tuple[int, bytes] | None]:
        with self._lock:
            return self._arriving.setdefault(rank, SimpleQueue())


class WireEnd:
    """A rank's carrier."""

    def __init__(self, rank: int, wire: Wire) -> None:
        self._rank = rank
        self._wire = wire
        self._peers: Sequence[int] = ()

    def open(self, peers: Sequence[int], receiver: Receiver) -> None:
        """See `Carrier.open`."""
        self._peers = peers
        self._wire.attach(self._rank, receiver)

    def send(self, rank: int, frame: Frame) -> None:
        """See `Carrier.send`."""
        self._wire.carry(self._rank, rank, frame)

    def close(self, last: Frame, hurry: bool, seconds: float) -> None:
        """See `Carrier.close`."""
        for peer in self._peers:
            self.send(peer, last)

    def connect_error(self, rank: int, is_known: bool) -> PlanCompilerError | None:
        """See `Carrier.connect_error`."""
        return None

    def where(self, rank: int) -> str:
        """See `Carrier.where`."""
        return f"rank {rank}"
