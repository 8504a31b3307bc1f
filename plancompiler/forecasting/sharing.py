"""What tasks of ranks share: links, and the cores of a host.

A link has a way in and a way out for each rank. A collective uses both of each member, a copy the
reader's way in and the way out of whoever is read, for the part of its time in which bytes move.

Where a machine's file says how many cores a host has, each stream of a rank on it takes one: the
whole time in which it computes, and of what it moves the part in which bytes move, as a core copies
them. The rest of a collective or a copy is waiting, for which no core is taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping

from plancompiler.costs import Machine
from plancompiler.forecasting.task_time import TaskTimes
from plancompiler.forecasting.traffic import BETWEEN, WITHIN, link_name
from plancompiler.ir.task import unpack_id
from plancompiler.plan.plan import CollectiveSpec, CopySpec, Plan, Task
from plancompiler.simulate import Uses

Shares = tuple[tuple[Hashable, float], ...]
"""What a task uses, and how much of it."""


def uses_of(
    plans: Mapping[int, Plan], times: TaskTimes, stands_for: Callable[[int], int] | None = None
) -> Uses:
    """What the tasks of some plans share, where these stand for those of all ranks."""
    cores = _cores(plans, times.machine, stands_for or (lambda rank: rank))

    def uses(rank: int, task: Task) -> Shares:
        moving = times.moving_part(plans[rank], task)
        links = tuple((each, moving) for each in ways(plans[rank], task)) if moving else ()
        working = moving if moves(task) else 1.0
        shared = cores.get(rank, ()) if working else ()
        return links + tuple((each, working * share) for each, share in shared)

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


def moves(task: Task) -> bool:
    """Whether a task brings what is elsewhere, for which it also waits."""
    return isinstance(task.spec, (CollectiveSpec, CopySpec))


def _cores(
    plans: Mapping[int, Plan], machine: Machine, stands_for: Callable[[int], int]
) -> dict[int, Shares]:
    """Rank → the part of the cores of hosts that one of its streams takes, with those of the ranks
    for which it stands there. Hosts are looked at where a rank is simulated.
    """
    cores = machine.host.cores
    if cores is None or machine.device.type != "cpu":
        return {}
    world_size = max(plan.world_size for plan in plans.values())
    hosts = {host_of(machine, rank) for rank in plans}
    streams = Counter(
        (stands_for(rank), host)
        for rank in range(world_size)
        if (host := host_of(machine, rank)) in hosts
    )
    shares: dict[int, Shares] = {}
    for (rank, host), count in streams.items():
        shares[rank] = (*shares.get(rank, ()), (("cores", host), count / cores))
    return shares


def host_of(machine: Machine, rank: int) -> int:
    """The node that a rank is on: ranks fill nodes in order."""
    return 0 if machine.node.devices is None else rank // machine.node.devices
