"""Whether a step of several micro-batches runs to its end: slots, data and credits of all ranks.

`StepModel` is a step as its schedule sees it, without tasks: gangs of ranks, each with its slots in
order, and links between them. Anyone who knows the schedule can build one; here it is built from
plans. It is a marked graph (Commoner et al. 1971), whose runs all come equally far, so one run
answers for all.

Why the answer holds for the tasks. Take one micro-batch's tasks in an order that no stream, datum
or collective contradicts, which exists (rule "nothing waits in a circle"), and the runs of parts in
the order in which the model ran them. Put the tasks of each run of a part in the first order, and
the runs in the second. Streams follow their rank's slots; data and credits between parts were there
when the part ran; data within a part follow the first order, and its credits come from earlier runs
of the same part; credits within a rank come from slots before (rule "slots suffice for the
micro-batches in between"). At the step's end all is as it was at its beginning, so the next step
can do the same. Thus there is one order of all tasks of the run that contradicts no wait; then no
tasks can ever wait for each other in a circle, whatever the streams' interleaving.

A part is taken as a whole: it starts when all its data are there and gives credits back at its end.
What would come through only because streams of one slot run apart is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from plancompiler.errors import DeadlockError
from plancompiler.ir.pipeline import Segment, Slot
from plancompiler.ir.task import rank_of
from plancompiler.plan.index import PlanIndex
from plancompiler.plan.plan import Group, RegisterDesc, communicator_of
from plancompiler.plan.rules_ranks import PlansIndex


class PartRun(NamedTuple):
    """A part of the step run for one micro-batch (0 for a part that runs once)."""

    part: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Link:
    """A register that one part of a step makes and another part, of other ranks, reads."""

    name: str
    source: int
    """Part that makes it."""
    target: int
    """Part that reads it."""
    slots: int = 1
    """Versions that the source may be ahead of the target."""
    per_microbatch: bool = True
    """Whether each micro-batch has a version. Else the target waits for the source's last run, and
    the source never waits: it makes one version in a step."""


@dataclass(frozen=True, slots=True)
class Gang:
    """Ranks with the same slots in the same parts: one of them stands for all."""

    ranks: tuple[int, ...]
    runs: tuple[PartRun, ...]
    """What they run in a step, one after another."""
    names: tuple[str, ...] = ()
    """What each of `runs` is called."""


class Wait(NamedTuple):
    """One edge of a circle: a gang stands before a run because of another gang."""

    gang: int
    run: int
    """Index into the gang's runs."""
    other: int
    """The gang that it waits for."""
    link: Link | None
    """None where the other gang has to come to the same part."""
    credit: bool
    """Whether it waits for a free slot of the link's register; else for its data."""


@dataclass(frozen=True, slots=True)
class StepModel:
    """Gangs, the parts that they run, and links between parts.

    A part runs when all its gangs have come to it, for micro-batches 0, 1, ... in turn; each of
    them has it once for each.
    """

    gangs: tuple[Gang, ...]
    links: tuple[Link, ...]

    def run(self) -> StepRun:
        """Run as much of the step as can run."""
        return StepRun(self)


class StepRun:
    """A step as far as it came. Time is linear in the gangs' runs × links of a part."""

    def __init__(self, model: StepModel) -> None:
        self.gangs = model.gangs
        self.order: list[PartRun] = []
        """Runs in an order in which all can be done."""
        self._members: dict[int, list[int]] = {}
        """Part → its gangs."""
        self._total: dict[int, int] = {}
        """Part → its runs in a step."""
        for number, gang in enumerate(self.gangs):
            for run in gang.runs:
                if not run.microbatch:
                    self._members.setdefault(run.part, []).append(number)
                self._total[run.part] = max(self._total.get(run.part, 0), run.microbatch + 1)
        self._incoming: dict[int, list[Link]] = {part: [] for part in self._total}
        self._outgoing: dict[int, list[Link]] = {part: [] for part in self._total}
        for link in _narrowest(model.links):
            self._incoming[link.target].append(link)
            self._outgoing[link.source].append(link)
        self._at = [0] * len(self.gangs)
        """Runs that each gang has done."""
        self._done = dict.fromkeys(self._total, 0)
        """Runs that each part has done."""
        self._here = dict.fromkeys(self._total, 0)
        """Gangs that stand before each part."""
        for number in range(len(self.gangs)):
            self._arrive(number)
        self._run()

    def _head(self, gang: int) -> PartRun | None:
        runs = self.gangs[gang].runs
        return runs[self._at[gang]] if self._at[gang] < len(runs) else None

    def _arrive(self, gang: int) -> None:
        head = self._head(gang)
        if head is not None:
            self._here[head.part] += 1

    def _run(self) -> None:
        pending = list(self._members)
        while pending:
            part = pending.pop()
            while self._is_ready(part):
                self.order.append(PartRun(part, self._done[part]))
                self._done[part] += 1
                self._here[part] = 0
                for gang in self._members[part]:
                    self._at[gang] += 1
                    self._arrive(gang)
                    head = self._head(gang)
                    if head is not None:
                        pending.append(head.part)
                pending += [link.target for link in self._outgoing[part]]
                pending += [link.source for link in self._incoming[part]]

    def _is_ready(self, part: int) -> bool:
        return self._here[part] == len(self._members[part]) and self._missing(part) is None

    def _missing(self, part: int) -> tuple[Link, bool] | None:
        """A link without data, or without credit (True), for the part's next run."""
        done = self._done
        for link in self._incoming[part]:
            needed = done[part] + 1 if link.per_microbatch else self._total[link.source]
            if done[link.source] < needed:
                return link, False
        for link in self._outgoing[part]:
            if link.per_microbatch and done[part] - done[link.target] >= link.slots:
                return link, True
        return None

    def circle(self) -> list[Wait]:
        """Gangs that wait for each other, each for the next; empty where the step ended."""
        gang = next((each for each in range(len(self.gangs)) if self._head(each)), None)
        if gang is None:
            return []
        path: dict[int, Wait] = {}
        while gang not in path:
            path[gang] = self._wait_of(gang)
            gang = path[gang].other
        return list(path.values())[list(path).index(gang) :]

    def _wait_of(self, gang: int) -> Wait:
        """Why a gang that has not finished stands where it does."""
        head = self.gangs[gang].runs[self._at[gang]]
        other = self._absent(head.part)
        if other is not None:
            return Wait(gang, self._at[gang], other, None, credit=False)
        missing = self._missing(head.part)
        if missing is None:
            raise ValueError("a gang's runs of a part are not micro-batches 0, 1, ... in turn")
        link, credit = missing
        slower = link.target if credit else link.source
        other = self._absent(slower)
        return Wait(
            gang,
            self._at[gang],
            self._members[slower][0] if other is None else other,
            link,
            credit=credit,
        )

    def _absent(self, part: int) -> int | None:
        """A gang of a part that stands elsewhere."""
        return next(
            (
                gang
                for gang in self._members[part]
                if (head := self._head(gang)) is not None and head.part != part
            ),
            None,
        )


def _narrowest(links: Iterable[Link]) -> Iterable[Link]:
    """Of links between the same parts at one rate, the one with the fewest slots."""
    narrowest: dict[tuple[int, int, bool], Link] = {}
    for link in links:
        key = link.source, link.target, link.per_microbatch
        if link.source != link.target and (
            key not in narrowest or link.slots < narrowest[key].slots
        ):
            narrowest[key] = link
    return narrowest.values()


# --- from plans -----------------------------------------------------------------------------------


def check_rates_across(index: PlansIndex) -> None:
    """What is collected over the micro-batches is read by other ranks after the last."""
    for one in index.ranks.values():
        for home, register, reader in _receives(index.ranks, one):
            maker = home.plan.task_by_id[register.producer]
            if (
                not register.per_microbatch
                and home.is_repeated(maker)
                and one.is_repeated(one.plan.task_by_id[reader])
            ):
                task = one.plan.task_by_id[reader]
                raise one.broken(
                    f"{task.name!r} reads {register.name!r} of rank {home.plan.rank}, which is "
                    "complete after the last micro-batch",
                    task,
                    got=f"read in segment {str(one.plan.segments[task.segment])!r}",
                    expected="a segment that runs once per step",
                )


def _receives(
    ranks: Mapping[int, PlanIndex], one: PlanIndex
) -> Iterator[tuple[PlanIndex, RegisterDesc, int]]:
    """(the sender, its register, the task here that reads it) for senders that are known."""
    for remote in one.plan.remote_registers:
        home = ranks.get(rank_of(remote.id))
        if home is not None:
            register = home.plan.register_by_id[remote.id]
            for task in remote.consumers:
                if task in one.plan.task_by_id:
                    yield home, register, task


def check_slots_finish(index: PlansIndex) -> None:
    """With their slots, data and credits, all ranks come to the end of the step."""
    if all(one.plan.microbatches == 1 for one in index.ranks.values()):
        return  # one micro-batch is all there is, and has been looked at task by task
    model = step_model(index)
    circle = model.run().circle()
    if not circle:
        return
    first = model.gangs[circle[0].gang]
    raise DeadlockError(
        f"the plans break the rule {index.rule!r}: slots of {len(circle)} groups of ranks wait for "
        "each other",
        rank=first.ranks[0],
        got=describe_circle(model, circle),
        expected="slots and register counts with which all micro-batches come through",
    )


def describe_circle(model: StepModel, circle: Sequence[Wait]) -> str:
    """Who stands before which segment, and what each waits for."""
    return "; ".join(_wait_text(model, wait) for wait in circle)


def _wait_text(model: StepModel, wait: Wait) -> str:
    gang, other = model.gangs[wait.gang], model.gangs[wait.other]
    here = f"{_ranks_text(gang)} before {gang.names[wait.run]}"
    if wait.link is None:
        return f"{here} waits for {_ranks_text(other)} to come to the same segment"
    what = "a free slot" if wait.credit else "the data"
    return f"{here} waits for {what} of register %{wait.link.name} from {_ranks_text(other)}"


def _ranks_text(gang: Gang) -> str:
    word = "rank" if len(gang.ranks) == 1 else "ranks"
    return f"{word} {', '.join(map(str, gang.ranks))}"


def step_model(index: PlansIndex) -> StepModel:
    """The model of plans. What meets in collectives or sends data around in a circle within one
    micro-batch is one part. Raises DeadlockError where a part cannot run as one."""
    ranks = index.ranks
    number = {
        (rank, segment): vertex
        for vertex, (rank, segment) in enumerate(
            (rank, segment)
            for rank, one in ranks.items()
            for segment in range(len(one.plan.segments))
        )
    }
    after: list[list[int]] = [[] for _ in number]
    received: list[tuple[str, int, int, int, bool]] = []
    collective_vertices: dict[tuple[Group, int], int] = {}
    for rank, one in ranks.items():
        count: dict[int, int] = {}
        for task in one.plan.tasks:
            group = communicator_of(task.spec)
            if group is not None:
                count[group] = count.get(group, -1) + 1
                here = number[rank, task.segment]
                key = one.plan.communicators[group].group, count[group]
                there = collective_vertices.setdefault(key, here)
                after[here].append(there)
                after[there].append(here)
        for home, register, reader in _receives(ranks, one):
            source = number[home.plan.rank, home.plan.task_by_id[register.producer].segment]
            target = number[rank, one.plan.task_by_id[reader].segment]
            after[source].append(target)
            received.append(
                (register.name, source, target, register.register_count, register.per_microbatch)
            )
    part = strong_components(after)
    _check_parts(index, number, part)
    gangs: dict[tuple[tuple[int, ...], tuple[Slot, ...]], list[int]] = {}
    for rank, one in ranks.items():
        parts = tuple(part[number[rank, segment]] for segment in range(len(one.plan.segments)))
        gangs.setdefault((parts, one.plan.slots), []).append(rank)
    return StepModel(
        gangs=tuple(
            Gang(
                tuple(members),
                tuple(PartRun(parts[slot.segment], slot.microbatch) for slot in slots),
                tuple(slot_name(ranks[members[0]].plan.segments, slot) for slot in slots),
            )
            for (parts, slots), members in gangs.items()
        ),
        links=tuple(
            Link(name, part[source], part[target], slots, per_microbatch)
            for name, source, target, slots, per_microbatch in received
        ),
    )


def slot_name(segments: Sequence[Segment], slot: Slot) -> str:
    """What people call a run of a segment."""
    segment = segments[slot.segment]
    if segment.kind.per_microbatch:
        return f"{segment} of micro-batch {slot.microbatch}"
    return str(segment)


def _check_parts(
    index: PlansIndex, number: Mapping[tuple[int, int], int], part: Sequence[int]
) -> None:
    """A part has one segment of each of its ranks, and all of them run as often."""
    seen: dict[tuple[int, int], int] = {}
    first: dict[int, tuple[int, Segment]] = {}
    for (rank, segment), vertex in number.items():
        named = index.ranks[rank].plan.segments[segment]
        other = seen.setdefault((rank, part[vertex]), segment)
        other_rank, other_named = first.setdefault(part[vertex], (rank, named))
        if other != segment:
            other_rank, other_named = rank, index.ranks[rank].plan.segments[other]
        if other != segment or other_named.kind.per_microbatch is not named.kind.per_microbatch:
            raise DeadlockError(
                f"the plans break the rule {index.rule!r}: two segments wait for each other",
                rank=rank,
                got=f"data of {str(other_named)!r} of rank {other_rank} come to {str(named)!r} of "
                f"rank {rank} and back",
                expected="data that follow the order of segments",
            )


def strong_components(after: Sequence[Sequence[int]]) -> list[int]:
    """Component of each vertex of a directed graph, from 0 (Tarjan 1972, without recursion)."""
    component_of = [-1] * len(after)
    low = [0] * len(after)
    seen: dict[int, int] = {}
    open_: list[int] = []
    components = 0
    for root in range(len(after)):
        if root in seen:
            continue
        path: list[tuple[int, Iterator[int]]] = []
        entered: int | None = root
        while True:
            if entered is not None:
                low[entered] = seen[entered] = len(seen)
                open_.append(entered)
                path.append((entered, iter(after[entered])))
            vertex, rest = path[-1]
            entered = None
            for other in rest:
                if other not in seen:
                    entered = other
                    break
                if component_of[other] < 0:
                    low[vertex] = min(low[vertex], low[other])
            if entered is not None:
                continue
            path.pop()
            if low[vertex] == seen[vertex]:
                while component_of[vertex] < 0:
                    component_of[open_.pop()] = components
                components += 1
            if not path:
                break
            before = path[-1][0]
            if component_of[vertex] < 0:
                low[before] = min(low[before], low[vertex])
    return component_of
