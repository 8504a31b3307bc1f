"""What tasks of ranks share: links.

A link has a way in and a way out for each rank. A collective uses both of each member, a copy the
reader's way in and the way out of whoever is read, for the part of its time in which bytes move.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping

from plancompiler.forecasting.task_time import TaskTimes
from plancompiler.forecasting.traffic import BETWEEN, WITHIN, link_name
from plancompiler.ir.task import unpack_id
from plancompiler.plan.plan import CollectiveSpec, CopySpec, Plan, Task
from plancompiler.simulate import Uses


def uses_of(
    plans: Mapping[int, Plan], times: TaskTimes, stands_for: Callable[[int], int] | None = None
) -> Uses:
    """What the tasks of some plans share, where these stand for those of all ranks."""

    def uses(rank: int, task: Task) -> tuple[tuple[Hashable, float], ...]:
        part = times.moving_part(plans[rank], task)
        return tuple((each, part) for each in ways(plans[rank], task)) if part else ()

    def ways(plan: Plan, task: Task) -> Iterator[Hashable]:
        spec = task.spec
        if isinstance(spec, CollectiveSpec):
            ranks = plan.communicators[spec.communicator].ranks
            links = {link_name(times.machine, plan.rank, rank) for rank in ranks}
            # A ring over several nodes is as fast as the links between them.
            link = BETWEEN if BETWEEN in links else WITHIN
            yield "in", link, plan.rank
            yield "out", link, plan.rank
        elif isinstance(spec, CopySpec):
            peer = unpack_id(plan.remote_register_by_id[task.inputs[0]].producer).rank
            link = link_name(times.machine, plan.rank, peer)
            yield "in", link, plan.rank
            yield "out", link, peer if stands_for is None else stands_for(peer)

    return uses
