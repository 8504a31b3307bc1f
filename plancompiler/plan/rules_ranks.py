"""Rules about a set of plans: sends and receives, collectives, no waiting in a circle."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import zip_longest
from typing import NamedTuple

from plancompiler.errors import DeadlockError
from plancompiler.ir.task import CROSSING, family_of, format_id, rank_of
from plancompiler.plan.digest import collective_orders
from plancompiler.plan.index import PlanIndex, format_ids
from plancompiler.plan.plan import (
    CollectiveSpec,
    ComputeSpec,
    Group,
    Plan,
    RegisterDesc,
    RemoteRegister,
    Task,
    communicator_of,
    exchanged,
)
from plancompiler.plan.rules_tasks import collective_extents
from plancompiler.plan.text import format_shape


class PlansIndex:
    """Plans of several ranks, each of which keeps the rules of a plan."""

    def __init__(self, plans: Mapping[int, Plan]) -> None:
        self.ranks = {rank: PlanIndex(plan) for rank, plan in sorted(plans.items())}
        self.rule = ""
        self._collective_orders: dict[int, dict[Group, Sequence[tuple[int, int]]]] = {}

    @cached_property
    def graph(self) -> StepGraph:
        """What waits for what in one step."""
        return StepGraph(self.ranks)

    def collective_order(self, rank: int, group: Group) -> Sequence[tuple[int, int]]:
        """A rank's collectives of a group over a step, as (family, micro-batch)."""
        if rank not in self._collective_orders:
            plan = self.ranks[rank].plan
            self._collective_orders[rank] = {
                plan.communicators[index].group: order
                for index, order in collective_orders(plan).items()
            }
        return self._collective_orders[rank].get(group, ())


def check_same_job(index: PlansIndex) -> None:
    """All plans are of one job, world and seed, each for the rank it is given for."""
    first: Plan | None = None
    for rank, one in index.ranks.items():
        plan = one.plan
        first = first or plan
        if plan.rank != rank or not rank < plan.world_size:
            raise one.broken(
                "a plan is given for another rank than its own",
                got=f"plan of rank {plan.rank} of {plan.world_size}",
                expected=f"a plan of rank {rank}",
            )
        ours, theirs = _job_terms(plan), _job_terms(first)
        if ours != theirs:
            raise one.broken(
                f"the plans of ranks {first.rank} and {rank} are of different jobs",
                got=ours,
                expected=theirs,
            )


def _job_terms(plan: Plan) -> str:
    schedule = f", {plan.schedule} of {plan.microbatches} micro-batches" if plan.schedule else ""
    return f"{plan.job!r} on {plan.world_size} ranks, seed {plan.seed}{schedule}"


def check_receives(index: PlansIndex) -> None:
    """Whatever a rank receives is sent: the producer's rank knows the register and its readers."""
    for rank, one in index.ranks.items():
        for remote in one.plan.remote_registers:
            home = index.ranks.get(rank_of(remote.id))
            if home is None:
                continue
            reader = next(
                (task for key in remote.consumers if (task := one.plan.task_by_id.get(key))),
                None,
            )
            if reader is None:
                continue  # a send without receive, which the next rule tells from the other side
            sent = home.plan.register_by_id.get(remote.id)
            if sent is None or reader.id not in sent.consumers:
                raise one.broken(
                    f"receive without send: {reader.name!r} reads {remote.name!r}, which rank "
                    f"{home.plan.rank} does not send to it",
                    reader,
                    got=f"no register {format_id(remote.id)} on rank {home.plan.rank}"
                    if sent is None
                    else f"register {sent.name!r} sent to {format_ids(_away(sent))}",
                    expected=f"a register that lists {format_id(reader.id)}",
                )
            # Credits and arrivals are per version, so both sides must count the same versions.
            ours, theirs = _terms(remote, remote.consumers), _terms(sent, _away(sent))
            if ours != theirs:
                raise one.broken(
                    f"ranks {home.plan.rank} and {rank} disagree about {remote.name!r}",
                    reader,
                    got=f"rank {rank} has {ours}",
                    expected=f"as rank {home.plan.rank} has it: {theirs}",
                )


def _away(register: RegisterDesc) -> list[int]:
    rank = rank_of(register.id)
    return [task for task in register.consumers if rank_of(task) != rank]


def _terms(register: RegisterDesc | RemoteRegister, readers: Iterable[int]) -> str:
    rank = rank_of(register.id)
    return (
        f"{register.dtype}{format_shape(register.shape)}, sync id {format_id(register.sync_id)}, "
        f"made by {format_id(register.producer)}, read by "
        f"{format_ids(task for task in readers if rank_of(task) != rank)}"
        f"{', once per micro-batch' if register.per_microbatch else ''}"
    )


def check_sends(index: PlansIndex) -> None:
    """Whatever a rank sends is received: each reader exists and reads that register."""
    for one in index.ranks.values():
        for register in one.plan.registers:
            if register.sync_id == -1:
                continue
            for task_id in _away(register):
                other = index.ranks.get(rank_of(task_id))
                if other is None:
                    continue
                reader = other.plan.task_by_id.get(task_id)
                if (
                    reader is None
                    or reader.kind not in CROSSING
                    or register.id not in reader.inputs
                ):
                    reads = "does not exist" if reader is None else f"is {reader.name!r}"
                    raise one.broken(
                        f"send without receive: {register.name!r} is sent to rank "
                        f"{other.plan.rank}, where no task receives it",
                        register,
                        got=f"task {format_id(task_id)} {reads}",
                        expected=f"a copy to rank {other.plan.rank} that reads "
                        f"{format_id(register.id)}",
                    )


def check_collective_order(index: PlansIndex) -> None:
    """All members of a communicator run the same collectives in the same order."""
    for group, members in _communicators(index).items():
        known = {rank: families for rank, families in members.items() if rank in index.ranks}
        first = next(iter(known))
        for rank in sorted(set(group.ranks) & set(index.ranks)):
            mine, theirs = known.get(rank, ()), known[first]
            if mine == theirs:
                continue
            at = next(
                (
                    place
                    for place, pair in enumerate(zip(mine, theirs, strict=False))
                    if pair[0] != pair[1]
                ),
                min(len(mine), len(theirs)),
            )
            raise index.ranks[rank].broken(
                f"ranks {first} and {rank} run the collectives of ranks {group} in different "
                "orders",
                _collective(index.ranks[rank], group, at),
                got=f"as number {at} rank {rank} runs {_family(index, rank, group, mine, at)}",
                expected=f"{_family(index, first, group, theirs, at)}, as rank {first} does",
            )
        if index.ranks[first].plan.microbatches > 1:
            _check_slot_order(index, group, sorted(known))


def _check_slot_order(index: PlansIndex, group: Group, members: list[int]) -> None:
    """The same with micro-batches: whose collectives follow whose is the order of the slots."""
    first, *others = members
    expected = index.collective_order(first, group)
    for rank in others:
        actual = index.collective_order(rank, group)
        if actual == expected:
            continue
        at = next(
            place for place, pair in enumerate(zip_longest(actual, expected)) if pair[0] != pair[1]
        )
        got, wanted = (
            f"family {order[at][0]} for micro-batch {order[at][1]}" if at < len(order) else "none"
            for order in (actual, expected)
        )
        raise index.ranks[rank].broken(
            f"ranks {first} and {rank} run the collectives of ranks {group} in different orders "
            "over the micro-batches",
            got=f"as number {at} of the step rank {rank} runs {got}",
            expected=f"{wanted}, as rank {first} does",
        )


def _communicators(index: PlansIndex) -> dict[Group, dict[int, tuple[int, ...]]]:
    """Group of a communicator → member → families in order."""
    communicators: dict[Group, dict[int, tuple[int, ...]]] = {}
    for rank, one in index.ranks.items():
        for communicator in one.plan.communicators:
            communicators.setdefault(communicator.group, {})[rank] = communicator.families
    return communicators


def _collective(one: PlanIndex, group: Group, at: int) -> Task | None:
    """A rank's collective number `at` of a group."""
    tasks = [task for of, task in _collectives(one) if of == group]
    return tasks[at] if at < len(tasks) else None


def _family(index: PlansIndex, rank: int, group: Group, families: tuple[int, ...], at: int) -> str:
    task = _collective(index.ranks[rank], group, at)
    if task is None or at >= len(families):
        return "no collective"
    return f"family {families[at]} ({task.name!r})"


def _collectives(one: PlanIndex) -> Iterator[tuple[Group, Task]]:
    """(group, task) per collective of a rank, in plan order."""
    for task in one.plan.tasks:
        used = communicator_of(task.spec)
        if used is not None:
            yield one.plan.communicators[used].group, task


def check_launch_order(index: PlansIndex) -> None:
    """Over all their streams, ranks come to the collectives that they share in one order.

    Streams with threads of their own could do without it. A device's rank launches all of them from
    one thread, in plan order: NCCL wants launches of several communicators in one order on all
    ranks, because what is launched first may occupy a device until its peers come.
    """
    followers: dict[_Launch, dict[_Launch, int]] = {}
    waits: dict[_Launch, int] = {}
    for rank, one in index.ranks.items():
        before: _Launch | None = None
        for launch in _launches(one.plan):
            waits.setdefault(launch, 0)
            if before is not None and launch not in followers.setdefault(before, {}):
                followers[before][launch] = rank
                waits[launch] += 1
            before = launch
    ready = [launch for launch, count in waits.items() if not count]
    while ready:
        for after in followers.get(ready.pop(), ()):
            waits[after] -= 1
            if not waits[after]:
                ready.append(after)
    stuck = {launch for launch, count in waits.items() if count}
    if not stuck:
        return
    # From what waits, go back to something that it waits for, until one comes again.
    earlier = {
        after: (launch, rank)
        for launch in stuck
        for after, rank in followers.get(launch, {}).items()
        if after in stuck
    }
    at = next(launch for launch in earlier)
    seen: dict[_Launch, None] = {}
    while at not in seen:
        seen[at] = None
        at = earlier[at][0]
    circle = list(seen)[list(seen).index(at) :]
    steps = [
        f"rank {earlier[launch][1]} comes to family {earlier[launch][0].family} before family "
        f"{launch.family}"
        for launch in reversed(circle)
    ]
    raise DeadlockError(
        f"the plans break the rule {index.rule!r}: the orders of {len(circle)} collectives make a "
        "circle",
        rank=earlier[circle[0]][1],
        got="; ".join(steps),
        expected="one order of the collectives of all communicators, on all ranks",
    )


class _Launch(NamedTuple):
    """One run of a collective."""

    group: Group
    family: int
    microbatch: int


def _launches(plan: Plan) -> Iterator[_Launch]:
    """A rank's collectives over a step, on all streams, in plan order and that of its slots."""
    by_segment: dict[int, list[tuple[Group, int]]] = {}
    for task in plan.tasks:
        used = communicator_of(task.spec)
        if used is not None:
            group = plan.communicators[used].group
            by_segment.setdefault(task.segment, []).append((group, family_of(task.id)))
    for segment, microbatch in plan.slots:
        for group, family in by_segment.get(segment, ()):
            yield _Launch(group, family, microbatch)


def check_same_collectives(index: PlansIndex) -> None:
    """Members of one collective do the same to values of the same dtype and shape."""
    seen: dict[tuple[Group, int], tuple[int, Task, str]] = {}
    for rank, one in index.ranks.items():
        count: dict[Group, int] = {}
        for group, task in _collectives(one):
            number = count[group] = count.get(group, -1) + 1
            terms = _collective_terms(one, task)
            other, other_task, expected = seen.setdefault((group, number), (rank, task, terms))
            if terms != expected:
                raise one.broken(
                    f"ranks {other} and {rank} disagree about the collective {task.name!r}",
                    task,
                    got=f"rank {rank} runs {terms}",
                    expected=f"{expected}, as rank {other} does in {other_task.name!r}",
                )


def _collective_terms(one: PlanIndex, task: Task) -> str:
    spec = task.spec
    registers = one.plan.register_by_id
    if isinstance(spec, ComputeSpec):
        lanes = [registers[each] for each in exchanged(spec, task.inputs, task.outputs)]
        passed = ", ".join(f"{each.dtype}{format_shape(each.shape)}" for each in lanes)
        return f"{spec.kind} passing on {passed}"
    if not isinstance(spec, CollectiveSpec):
        return ""
    values = []
    for source, target in zip(task.inputs, task.outputs, strict=True):
        before, after = registers[source], registers[target]
        extents = collective_extents(spec, before.shape, after.shape) or ()
        values.append(f"{before.dtype}{format_shape(extents)}")
    reduction = "" if spec.reduction is None else f" {spec.reduction}"
    return (
        f"{spec.primitive}{reduction} of {', '.join(values)} "
        f"along axes {spec.src_axis} and {spec.dst_axis}"
    )


class StepGraph:
    """What waits for what in one step of all ranks; a collective is one node for all members.

    Of a step with several micro-batches it is one of them, with what is done once per step before
    and after; how they follow each other is another question (`rules_schedule`). Streams' order
    across the step's end and credits lead from a step to a later one only, because a register has
    one slot or more. A circle would have to come back to its step, so it lies within one step, and
    one step is the whole question.
    """

    def __init__(self, ranks: Mapping[int, PlanIndex]) -> None:
        self.ranks = ranks
        self.members: list[list[Task]] = []
        """Tasks of each node."""
        self.node_of: dict[int, int] = {}
        """Task id → node."""
        self.successors: list[list[int]] = []
        collective_nodes: dict[tuple[Group, int], int] = {}
        for one in ranks.values():
            count: dict[Group, int] = {}
            for task in one.plan.tasks:
                node = len(self.members)
                used = communicator_of(task.spec)
                if used is not None:
                    group = one.plan.communicators[used].group
                    number = count[group] = count.get(group, -1) + 1
                    node = collective_nodes.setdefault((group, number), node)
                if node == len(self.members):
                    self.members.append([])
                self.members[node].append(task)
                self.node_of[task.id] = node
        self.successors = [[] for _ in self.members]
        self._waits = [0] * len(self.members)
        for before, after in self._edges():
            self.successors[before].append(after)
            self._waits[after] += 1

    def _edges(self) -> Iterator[tuple[int, int]]:
        node_of = self.node_of
        for one in self.ranks.values():
            registers, remotes = one.plan.register_by_id, one.plan.remote_register_by_id
            latest: dict[int, int] = {}
            for stream, task in zip(one.streams, one.plan.tasks, strict=True):
                node = node_of[task.id]
                if stream in latest:
                    yield latest[stream], node
                latest[stream] = node
                for key in (*task.inputs, *task.controls_in) if task.controls_in else task.inputs:
                    register = registers.get(key) or remotes[key]
                    producer = node_of.get(register.producer)
                    if producer is not None:
                        yield producer, node

    def stuck(self) -> list[bool]:
        """Which nodes can never run (Kahn 1962); all False when there is no circle."""
        waits = list(self._waits)
        ready = [node for node, count in enumerate(waits) if not count]
        while ready:
            for after in self.successors[ready.pop()]:
                waits[after] -= 1
                if not waits[after]:
                    ready.append(after)
        return [count > 0 for count in waits]

    def circle(self, stuck: list[bool]) -> list[int]:
        """Nodes of one circle, each waited for by the next."""
        before: dict[int, int] = {}
        for node, after in enumerate(self.successors):
            if stuck[node]:
                for other in after:
                    before.setdefault(other, node)
        node = stuck.index(True)
        path: dict[int, int] = {}
        while node not in path:
            path[node] = len(path)
            node = before[node]
        return list(reversed(list(path)[path[node] :]))

    def name(self, node: int) -> str:
        """A node with its ranks."""
        tasks = self.members[node]
        ranks = ", ".join(str(rank_of(task.id)) for task in tasks)
        word = "rank" if len(tasks) == 1 else "ranks"
        return f"{tasks[0].kind} {tasks[0].name!r} ({format_id(tasks[0].id)}) on {word} {ranks}"

    def reason(self, before: int, after: int) -> str:
        """Why `after` waits for `before`."""
        for task in self.members[after]:
            one = self.ranks[rank_of(task.id)]
            for key in (*task.inputs, *task.controls_in):
                register = one.plan.register_by_id.get(key) or one.plan.remote_register_by_id.get(
                    key
                )
                if register is not None and self.node_of.get(register.producer) == before:
                    return f"%{register.name}"
        shared = {(rank_of(task.id), task.stream) for task in self.members[before]} & {
            (rank_of(task.id), task.stream) for task in self.members[after]
        }
        rank, stream = min(shared, key=lambda pair: (pair[0], pair[1].value))
        return f"the order of stream {stream} of rank {rank}"

    def reaches(self, first: int, second: int) -> bool:
        """Whether there is a way from one node to another."""
        seen = {first}
        pending = [first]
        while pending:
            for after in self.successors[pending.pop()]:
                if after == second:
                    return True
                if after not in seen:
                    seen.add(after)
                    pending.append(after)
        return False


def check_no_circle(index: PlansIndex) -> None:
    """No tasks wait in a circle of streams, data, control, copies and collectives."""
    graph = index.graph
    stuck = graph.stuck()
    if True not in stuck:
        return
    circle = graph.circle(stuck)
    steps = [
        f"{graph.name(after)} waits for {graph.name(before)} ({graph.reason(before, after)})"
        for before, after in zip(circle, [*circle[1:], circle[0]], strict=True)
    ]
    task = graph.members[circle[0]][0]
    raise DeadlockError(
        f"the plans break the rule {index.rule!r}: {len(circle)} tasks wait for each other",
        at=task if task.source.file else None,
        rank=rank_of(task.id),
        got="; ".join(steps),
        expected="an order in which all tasks can run",
    )


def check_remote_readers(index: PlansIndex) -> None:
    """A value that another rank reads is overwritten only after that rank has read it."""
    for rank, one in index.ranks.items():
        for members in one.groups.values():
            readers: list[tuple[int, RegisterDesc]] = []
            for register in members:
                if register.inplace_of != -1 and not register.is_view:
                    _check_read(index, rank, register, readers)
                readers += [(task, register) for task in one.remote_consumers(register)]


def _check_read(
    index: PlansIndex, rank: int, register: RegisterDesc, readers: list[tuple[int, RegisterDesc]]
) -> None:
    graph = index.graph
    writer = graph.node_of[register.producer]
    for task_id, old in readers:
        reader = graph.node_of.get(task_id)
        if reader is not None and not graph.reaches(reader, writer):
            raise index.ranks[rank].broken(
                f"{graph.name(writer)} overwrites {old.name!r} while {graph.name(reader)} may "
                "still read it",
                register,
                got="no order between the two tasks",
                expected="the remote reader done before",
            )
