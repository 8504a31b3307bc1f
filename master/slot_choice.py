"""Which free slots a job gets: pure.

The ranks of a job exchange more with each other than with anybody else, so they lie on as few hosts
as can be, and on the host where they leave the least over.
"""

from __future__ import annotations

from collections.abc import Iterable

from plancompiler.master.peers import host_of
from plancompiler.master.records import Worker


def choose_slots(free: Iterable[Worker], count: int) -> tuple[int, ...]:
    """So many slots of free workers, in rising order: the job's ranks follow that of the slots."""
    hosts: dict[str, list[int]] = {}
    for worker in free:
        hosts.setdefault(host_of(worker.offer), []).append(worker.slot)
    # Slots of a host in order; hosts that fit before others, the tightest first, else the largest.
    by_fit = sorted(
        (sorted(slots) for slots in hosts.values()),
        key=lambda slots: (
            len(slots) < count,
            len(slots) if len(slots) >= count else -len(slots),
            slots,
        ),
    )
    return tuple(sorted([slot for slots in by_fit for slot in slots][:count]))
