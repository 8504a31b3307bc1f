"""Ranks as threads that share no memory: what goes between them is counted on its way."""

from __future__ import annotations

import gc
import threading
import tracemalloc
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue

import numpy as np

from plancompiler.errors import PlanCompilerError
from plancompiler.executor.comm.messages import Frame, MessageLink, Receiver
from plancompiler.executor.comm.remote_wire import DATA
from plancompiler.executor.runtime import Runtime
from plancompiler.plan.plan import Plan


class Switch:
    """Carries frames between links of one process, in order for each pair. A thread for each rank
    hands over what comes, so that who sends waits for nobody.
    """

    def __init__(self) -> None:
        self.frames: defaultdict[int, SimpleQueue[tuple[int, bytes] | None]]
        self.frames = defaultdict(SimpleQueue)
        self.threads: list[threading.Thread] = []
        self.lock = threading.Lock()
        self.payload: Counter[tuple[int, int]] = Counter()
        """(from, to) → bytes of data that were handed over, without headers."""

    def attach(self, rank: int, receiver: Receiver) -> None:
        def hand_over() -> None:
            while (arrived := self.frames[rank].get()) is not None:
                receiver.receive(*arrived)

        thread = threading.Thread(target=hand_over)
        self.threads.append(thread)
        thread.start()

    def carry(self, sender: int, rank: int, frame: Frame) -> None:
        # Under a lock, so that frames of several threads of a rank stay whole and in order.
        with self.lock:
            data = frame.encoded()
            if data[0] == DATA:
                # What follows the frame's own header, which says nothing of forecasts.
                self.payload[sender, rank] += len(data) - len(frame.header)
            self.frames[rank].put((sender, data))

    def close(self) -> None:
        for frames in list(self.frames.values()):
            frames.put(None)
        for thread in self.threads:
            thread.join()


class Port:
    """A rank's carrier."""

    def __init__(self, rank: int, switch: Switch) -> None:
        self.rank = rank
        self.switch = switch
        self.peers: Sequence[int] = ()

    def open(self, peers: Sequence[int], receiver: Receiver) -> None:
        self.peers = peers
        self.switch.attach(self.rank, receiver)

    def send(self, rank: int, frame: Frame) -> None:
        self.switch.carry(self.rank, rank, frame)

    def close(self, last: Frame, hurry: bool, seconds: float) -> None:
        for peer in self.peers:
            self.send(peer, last)

    def connect_error(self, rank: int, is_known: bool) -> PlanCompilerError | None:
        return None

    def where(self, rank: int) -> str:
        return f"rank {rank}"


def in_threads(work: Callable[[int], None], ranks: Sequence[int]) -> None:
    errors: list[BaseException] = []

    def guarded(rank: int) -> None:
        try:
            work(rank)
        except BaseException as error:  # raised below
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def held_arrays() -> int:
    """Bytes that NumPy holds, as Python's own tracer saw them taken. An array without elements is
    given one byte, which is not counted.
    """
    gc.collect()
    only = tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)
    traces = tracemalloc.take_snapshot().filter_traces([only]).traces
    return sum(trace.size for trace in traces if trace.size > 1)


def measured(plans: Mapping[int, Plan], steps: int = 2) -> tuple[int, Counter[tuple[int, int]]]:
    """Bytes of arrays that all ranks hold once they are prepared, and payload bytes of a step by
    (from, to).
    """
    switch = Switch()
    used = [rank for rank, plan in plans.items() if not plan.is_idle]
    tracemalloc.start()
    try:
        before = held_arrays()
        runtimes = {
            rank: Runtime(plans[rank], MessageLink(rank, Port(rank, switch))) for rank in used
        }
        try:
            in_threads(lambda rank: runtimes[rank].prepare(), used)
            held = held_arrays() - before
            tracemalloc.stop()  # which makes steps slow
            switch.payload.clear()
            in_threads(lambda rank: runtimes[rank].run(steps), used)
        finally:
            in_threads(lambda rank: runtimes[rank].close(), used)
            switch.close()
    finally:
        tracemalloc.stop()
    return held, Counter({pair: count // steps for pair, count in switch.payload.items()})
