"""What the links between processes have in common: what they keep, and what every peer may say."""

from __future__ import annotations

from collections.abc import Callable

from plancompiler.errors import PlanCompilerError, WireFormatError
from plancompiler.executor.comm.host_wire import ABORT, NOTE, NOTICE, unpack_abort, unpack_notice
from plancompiler.executor.comm.link import Link, MemoryRegion, Sink
from plancompiler.executor.comm.peer_failures import PeerFailures
from plancompiler.executor.memory import Buffer, Slots


class ProcessLink(PeerFailures, Link):
    """One rank's connection to ranks that are other processes."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self._buffers: dict[int, Buffer] = {}
        self._regions: dict[int, MemoryRegion] = {}
        self._deadline = 0.0
        self._sink: Sink | None = None
        self._watcher: Callable[[int, bytes], None] | None = None
        self._closed = False

    def watch(self, receive: Callable[[int, bytes], None]) -> None:
        """See `Link.watch`."""
        self._watcher = receive

    def _own_slots(self, region: int) -> Slots | None:
        own = self._regions.get(region)
        return None if own is None else own.slots(self._buffers.get(own.block))

    def free(self, rank: int, region: int) -> None:
        """See `Link.free`."""
        own = self._regions.pop(region, None) if rank == self.rank else None
        if own is not None:
            del self._buffers[own.block]

    def _take(self, rank: int, kind: int, packet: bytes, sink: Sink) -> bool:
        """Take a packet of a kind that all wires have; False after a peer's last one."""
        if kind == NOTICE:
            sink.notice(*unpack_notice(packet))
        elif kind == NOTE:
            if self._watcher is not None:
                self._watcher(rank, packet[1:])
        elif kind == ABORT:
            failed_rank, report = unpack_abort(packet)
            self.abort(failed_rank, PlanCompilerError.from_report(report))
            sink.peer_failed(self.abort_error())
            return False
        else:
            raise WireFormatError(f"rank {rank} sent an unknown packet", rank=rank)
        return True

    def _lose(self, rank: int, error: PlanCompilerError) -> None:
        """A peer cannot be talked to any more."""
        first = self.failure is None
        self.abort(rank, error)
        if first and self._sink is not None:
            self._sink.peer_failed(error)
