"""Which segment of a step each op belongs to: pipeline stages from placements or from names.

A *chunk* is a stage of the model, or with the schedule `interleaved` one of several on a stage.
Ops are in the chunk that the user named (`pc.stage`); where nothing is named, a value that moves to
other ranks moves to the next chunk. Gradients go the other way. What no such edge decides (data,
what is made of it before the first layer, recomputed activations) is in the chunk of its readers.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from plancompiler.errors import JobError, MicrobatchError
from plancompiler.ir import (
    BROADCAST,
    Job,
    Micro,
    Op,
    Partial,
    Phase,
    Sbp,
    Split,
    Value,
    freeze_attrs,
)
from plancompiler.ir.pipeline import Pipeline, Segment, SegmentKind
from plancompiler.ops.registry import op_def
from plancompiler.ops.rule import Signature
from plancompiler.passes.base import rewired


class Rate(enum.Enum):
    """When an op runs."""

    EARLY = "before the micro-batches"
    MICRO = "in every micro-batch"
    LATE = "after the micro-batches"


@dataclass(frozen=True, slots=True)
class Timed:
    """An op, its layouts along micro-batches, and when it runs."""

    op: Op
    signature: Signature
    rate: Rate


def place_in_segments(
    timed: Sequence[Timed], schedule: str, microbatches: int
) -> tuple[tuple[Op, ...], Pipeline]:
    """The ops in the order of their segments, with `micro` set, and the pipeline of these.

    Raises MicrobatchError for a stage without ops, for values that go back to an earlier stage, and
    for stages that share ranks.
    """
    gathers = {each.op.name for each in timed if _is_late_gather(each)}
    chunks = _decide(_analyse([each for each in timed if each.rate is Rate.MICRO]))
    pipeline = _pipeline(chunks, schedule, microbatches)
    first, last = 0, len(pipeline.segments) - 1
    segment: dict[str, int] = {}
    for each in timed:
        if each.rate is Rate.MICRO:
            segment[each.op.name] = pipeline.index[chunks.segment(each, schedule)]
        else:
            segment[each.op.name] = first if each.rate is Rate.EARLY else last
    ordered = sorted(
        _gathered_where_read(timed, gathers, segment), key=lambda each: segment[each.op.name]
    )
    ops = tuple(
        replace(
            each.op,
            micro=Micro(segment[each.op.name], each.signature.inputs, each.signature.outputs),
        )
        for each in ordered
    )
    return ops, pipeline


# --- late gathers ---------------------------------------------------------------------------------


def _is_late_gather(each: Timed) -> bool:
    return each.rate is not Rate.LATE and each.op.attr("late") is not None


def _gathered_where_read(
    timed: Sequence[Timed], gathers: set[str], segment: dict[str, int]
) -> list[Timed]:
    """The ops with a copy of each late gather in every segment that reads it, added to `segment`.

    A gathered parameter lives from its layer's first op to its last, a gathered activation while
    backward reads it. Kept from one segment to another they would live for as many micro-batches as
    are under way.
    """
    if not gathers:
        return list(timed)
    readers: dict[str, list[str]] = {}
    for each in timed:
        for value in each.op.inputs:
            readers.setdefault(value.name, []).append(each.op.name)
    instead: dict[str, dict[str, Value]] = {}
    copies: dict[str, list[Timed]] = {}
    for each in timed:
        op = each.op
        if op.name not in gathers:
            continue
        value = op.outputs[0]
        there = sorted({segment[reader] for reader in readers.get(value.name, ())}) or [0]
        for number, index in enumerate(there):
            suffix = f":{number}" if number else ""
            form = replace(value, name=value.name + suffix)
            # The op before which the exchange is to begin may be in an earlier segment, which ends
            # before this one: then it begins where the gather stands.
            ahead = op.attr("late")
            late = ahead if segment.get(str(ahead)) == index else ""
            attrs = freeze_attrs(dict(op.attrs) | {"late": late or ""})
            copy = replace(op, name=op.name + suffix, outputs=(form,), attrs=attrs)
            segment[copy.name] = index
            copies.setdefault(op.name, []).append(replace(each, op=copy))
            for reader in readers.get(value.name, ()):
                if segment[reader] == index:
                    instead.setdefault(reader, {})[value.name] = form
    placed: list[Timed] = []
    for each in timed:
        if each.op.name in copies:
            placed.extend(copies[each.op.name])
        elif each.op.name in instead:
            placed.append(replace(each, op=rewired(each.op, instead[each.op.name])))
        else:
            placed.append(each)
    return placed


# --- analysis: where the values of a micro-batch go -----------------------------------------------


@dataclass(frozen=True, slots=True)
class _Flow:
    """The ops that run in every micro-batch; all by the name of the op."""

    timed: Mapping[str, Timed]
    producers: Mapping[str, tuple[Op, ...]]
    """What makes the values of this micro-batch that an op reads."""
    readers: Mapping[str, Sequence[Op]]
    ranks: Mapping[str, frozenset[int]]
    apart_from: Mapping[frozenset[int], frozenset[frozenset[int]]]
    """Sets of ranks that have none in common with a set."""
    backward: frozenset[str]
    """Ops that belong to gradients: those of backward and what reads these."""
    is_named: bool
    """Whether the user named stages."""

    @property
    def ops(self) -> Iterator[Op]:
        """All ops in order."""
        return (each.op for each in self.timed.values())

    def fed_by(self, op: Op) -> list[Op]:
        """The producers of what an op reads, data aside."""
        return [each for each in self.producers[op.name] if not op_def(each.kind).source]

    def apart(self, left: Op, right: Op) -> bool:
        """Whether two ops have no rank in common."""
        return self.ranks[right.name] in self.apart_from[self.ranks[left.name]]

    def moves(self, op: Op) -> bool:
        """Whether an op brings a value to other ranks."""
        return any(self.apart(producer, op) for producer in self.producers[op.name])


def _analyse(timed: Sequence[Timed]) -> _Flow:
    producer = {value.name: each.op for each in timed for value in each.op.outputs}
    producers = {
        each.op.name: tuple(
            producer[value.name] for value in each.op.inputs if value.name in producer
        )
        for each in timed
    }
    readers: dict[str, list[Op]] = {}
    for each in timed:
        for one in producers[each.op.name]:
            readers.setdefault(one.name, []).append(each.op)
    # One set per placement: sets per op would take memory for ops times ranks.
    placements = dict.fromkeys(each.op.placement for each in timed)
    ranks = {placement: frozenset(placement.rank_list) for placement in placements}
    distinct = set(ranks.values())
    return _Flow(
        {each.op.name: each for each in timed},
        producers,
        readers,
        {each.op.name: ranks[each.op.placement] for each in timed},
        {one: frozenset(other for other in distinct if one.isdisjoint(other)) for one in distinct},
        _backward(timed, producers, readers),
        any(each.op.origin.stage >= 0 for each in timed),
    )


def _backward(
    timed: Sequence[Timed],
    producers: Mapping[str, Sequence[Op]],
    readers: Mapping[str, Sequence[Op]],
) -> frozenset[str]:
    names: set[str] = set()
    for each in timed:
        made = producers[each.op.name]
        if each.op.origin.phase is not Phase.FORWARD or any(one.name in names for one in made):
            names.add(each.op.name)
    # Constants that were shared with gradients, and are read by nothing else any more.
    for each in reversed(timed):
        op, reading = each.op, readers.get(each.op.name, ())
        alone = not producers[op.name] and not op_def(op.kind).source
        if alone and reading and all(reader.name in names for reader in reading):
            names.add(op.name)
    return frozenset(names)


# --- decisions: the chunk of every op -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Chunks:
    """The chunk of every op that runs in every micro-batch."""

    flow: _Flow
    of: Mapping[str, int]
    """By the name of the op."""
    backward: frozenset[str]
    """As those of the flow, with pieces where they are taken."""

    @property
    def count(self) -> int:
        return 1 + max(self.of.values(), default=-1)

    def ranks(self) -> list[frozenset[int]]:
        """The ranks of each chunk. Raises MicrobatchError for a chunk without ops."""
        forward = {self.of[op.name] for op in self.flow.ops if op.name not in self.backward}
        missing = next(chunk for chunk in range(len(forward) + 1) if chunk not in forward)
        if missing < self.count:
            op = next(op for op in self.flow.ops if self.of[op.name] >= missing)
            raise MicrobatchError(
                f"stage {missing} has no op that works on micro-batches",
                at=op,
                got=f"stage {self.of[op.name]}, and none on stage {missing}",
                expected="stages counted from 0 without a gap",
            )
        groups: list[set[frozenset[int]]] = [set() for _ in range(self.count)]
        for op in self.flow.ops:
            groups[self.of[op.name]].add(self.flow.ranks[op.name])
        return [frozenset().union(*each) for each in groups]

    def example(self, chunk: int) -> Op:
        """An op of a chunk, to name in an error."""
        return next(op for op in self.flow.ops if self.of[op.name] == chunk)

    def segment(self, each: Timed, schedule: str) -> Segment:
        """The segment of an op."""
        chunk = self.of[each.op.name]
        if each.op.name not in self.backward:
            return Segment(SegmentKind.FORWARD, chunk)
        if schedule == "zero_bubble" and self._is_weight(each):
            return Segment(SegmentKind.WEIGHT, chunk)
        return Segment(SegmentKind.BACKWARD, chunk)

    def _is_weight(self, each: Timed) -> bool:
        """Whether no other stage waits for it: all it makes are parts of sums over the batch."""
        if op_def(each.op.kind).collects:
            (producer,) = self.flow.producers[each.op.name]
            return self._is_weight(self.flow.timed[producer.name])
        return all(isinstance(sbp, Partial) for sbp in each.signature.outputs)


def _decide(flow: _Flow) -> _Chunks:
    """Raises MicrobatchError for values that go back to an earlier stage."""
    placing = _Placing(flow)
    placing.forward()
    placing.backward()
    return _Chunks(flow, placing.of, placing.conversions())


class _Placing:
    """Gives the ops of a flow their chunks."""

    def __init__(self, flow: _Flow) -> None:
        self._flow = flow
        self.of: dict[str, int] = {}
        self._hosts: dict[frozenset[int], set[int]] = {}
        """Chunks on a set of ranks."""

    def _host(self, op: Op, chunk: int) -> None:
        self._hosts.setdefault(self._flow.ranks[op.name], set()).add(chunk)

    def _hosted(self, op: Op) -> list[int]:
        """The chunks that an op's ranks have so far, ascending."""
        flow = self._flow
        ranks = flow.ranks[op.name]
        hosted: set[int] = set()
        for others, chunks in self._hosts.items():
            if others not in flow.apart_from[ranks]:
                hosted |= chunks
        return sorted(hosted)

    def _neighbours(self, op: Op, backward: bool) -> list[Op]:
        """Readers of one direction that have their chunk and share ranks with an op."""
        flow = self._flow
        return [
            reader
            for reader in flow.readers.get(op.name, ())
            if (reader.name in flow.backward) is backward
            and reader.name in self.of
            and not flow.apart(op, reader)
        ]

    # Forward.

    def forward(self) -> None:
        flow = self._flow
        forward = [op for op in flow.ops if op.name not in flow.backward]
        loose: list[Op] = []
        moving: list[Op] = []
        least: dict[str, int] = {}
        open_names: set[str] = set()
        for op in forward:
            counted = flow.fed_by(op)
            step = 0 if flow.is_named else 1
            reached = max(
                (least[each.name] + (step if flow.apart(each, op) else 0) for each in counted),
                default=0,
            )
            if flow.is_named and op.origin.stage >= 0 and not flow.moves(op):
                self._check_order(op, op.origin.stage, counted, least)
                least[op.name] = self.of[op.name] = op.origin.stage
                self._host(op, op.origin.stage)
                continue
            least[op.name] = reached
            crosses = any(flow.apart(each, op) for each in counted)
            if (crosses and flow.is_named) or (
                all(each.name in open_names for each in counted) and (flow.is_named or not crosses)
            ):
                open_names.add(op.name)
                loose.append(op)
            elif crosses:
                moving.append(op)
            else:
                self.of[op.name] = reached
                self._host(op, reached)
        for op in moving:
            self.of[op.name] = least[op.name]
            self._host(op, least[op.name])
        for op in reversed(moving):
            beside = [self.of[each.name] for each in self._neighbours(op, False)]
            self.of[op.name] = max(least[op.name], min(beside, default=0))
        self._place_loose(loose, least)
        for op in forward:
            counted = flow.fed_by(op)
            self._check_order(op, self.of[op.name], counted, self.of)

    def _place_loose(self, loose: Sequence[Op], least: Mapping[str, int]) -> None:
        """Place what no move decides: where its first reader is; what nobody on the way to another
        chunk reads (metrics), where its inputs are; else on the first chunk of its ranks.
        """
        flow = self._flow
        for op in reversed(loose):
            beside = [self.of[each.name] for each in self._neighbours(op, False)]
            elsewhere = [
                self.of[each.name]
                for each in flow.readers.get(op.name, ())
                if each.name in self.of and flow.apart(op, each)
            ]
            if beside and min(beside) < min(elsewhere, default=1 + max(beside)):
                self.of[op.name] = max(least[op.name], min(beside))
            elif elsewhere:
                before = [c for c in self._hosted(op) if least[op.name] <= c < min(elsewhere)]
                self.of[op.name] = max(before, default=least[op.name])
        for op in loose:
            if op.name not in self.of:
                known = [
                    self.of[each.name] for each in flow.producers[op.name] if each.name in self.of
                ]
                if known:
                    self.of[op.name] = max(least[op.name], *known)
            if op.name in self.of:
                self._host(op, self.of[op.name])
        for op in reversed(loose):
            if op.name not in self.of:
                beside = [self.of[each.name] for each in self._neighbours(op, False)]
                hosted = [chunk for chunk in self._hosted(op) if chunk >= least[op.name]]
                self.of[op.name] = min(beside or hosted, default=least[op.name])
                self._host(op, self.of[op.name])

    def _check_order(
        self, op: Op, chunk: int, producers: Iterable[Op], known: Mapping[str, int]
    ) -> None:
        for producer in producers:
            if known[producer.name] > chunk:
                raise MicrobatchError(
                    "a value goes back to an earlier stage",
                    at=op,
                    got=f"stage {chunk} reads %{producer.outputs[0].name} of stage "
                    f"{known[producer.name]}",
                    expected=f"stage {known[producer.name]} or later",
                    hint="name the stages in the order in which data passes through them",
                )

    # Backward.

    def backward(self) -> None:
        flow = self._flow
        backward = [op for op in flow.ops if op.name in flow.backward]
        loose: list[Op] = []
        open_names: set[str] = set()
        for op in backward:
            producers = flow.fed_by(op)
            gradients = [
                each
                for each in producers
                if each.name in flow.backward and each.name not in open_names
            ]
            moved = [
                each for each in producers if each.name in flow.backward and flow.apart(each, op)
            ]
            if moved:
                self.of[op.name] = self._stage_before(op, moved[0])
            elif gradients or (flow.is_named and op.origin.stage >= 0):
                # The sum of the gradients of what moved has the name of the move.
                named = [op.origin.stage] if flow.is_named and op.origin.stage >= 0 else []
                self.of[op.name] = min([self.of[each.name] for each in gradients] + named)
            else:
                # What is computed again, and gradients of losses: where the values come from.
                beside = [self.of[each.name] for each in producers if not flow.apart(each, op)]
                self.of[op.name] = max(beside, default=min(self._hosted(op), default=0))
                open_names.add(op.name)
                loose.append(op)
        for op in reversed(loose):
            readers = [self.of[each.name] for each in self._neighbours(op, True)]
            self.of[op.name] = max(self.of[op.name], *readers, 0)

    def _stage_before(self, op: Op, producer: Op) -> int:
        """The chunk to which a gradient goes that moves to other ranks."""
        chunk = self.of[producer.name]
        before = [each for each in self._hosted(op) if each < chunk]
        if not before:
            raise MicrobatchError(
                "a gradient goes on to a later stage",
                at=op,
                got=f"stage {chunk} of %{producer.outputs[0].name} on {producer.placement}, moved "
                f"to {op.placement}",
                expected=f"a stage before {chunk}",
                hint="calls that are computed again for backward must lie within one stage",
            )
        return before[-1]

    def conversions(self) -> frozenset[str]:
        """Pieces are taken where they are first read; what is collected, where it is made. The ops
        of backward after that.
        """
        flow = self._flow
        backward = set(flow.backward)
        for op in reversed(list(flow.ops)):
            if op.kind == "take_piece":
                readers = flow.readers[op.name]
                forward = [each for each in readers if each.name not in backward]
                if forward:
                    backward.discard(op.name)
                    self.of[op.name] = min(self.of[each.name] for each in forward)
                else:
                    backward.add(op.name)
                    self.of[op.name] = max(self.of[each.name] for each in readers)
        for op in flow.ops:
            if op_def(op.kind).collects:
                (producer,) = flow.producers[op.name]
                self.of[op.name] = self.of[producer.name]
        return frozenset(backward)


# --- the pipeline ---------------------------------------------------------------------------------


def _pipeline(chunks: _Chunks, schedule: str, microbatches: int) -> Pipeline:
    """The pipeline of these chunks, checked against the ranks that they are on."""
    ranks = chunks.ranks()
    group: list[int] = []
    for chunk, own in enumerate(ranks):
        before = [each for each in range(chunk) if not own.isdisjoint(ranks[each])]
        if not before:
            group.append(1 + max(group, default=-1))
            continue
        group.append(group[before[0]])
        odd = next((each for each in before if group[each] != group[chunk]), None)
        if schedule != "interleaved" or odd is not None:
            raise _shared(chunks, before[0] if odd is None else odd, chunk, ranks, schedule)
    stages = len(set(group))
    for chunk, stage in enumerate(group):
        if stage != chunk % stages:
            other = group.index(stage)
            raise _shared(chunks, other, chunk, ranks, schedule, stages)
    pipeline = Pipeline(schedule, microbatches, stages, len(ranks))
    pipeline.check()
    return pipeline


def _shared(
    chunks: _Chunks,
    one: int,
    other: int,
    ranks: Sequence[frozenset[int]],
    schedule: str,
    stages: int = 0,
) -> MicrobatchError:
    op = chunks.example(other)
    common = ", ".join(map(str, sorted(ranks[one] & ranks[other])))
    interleaved = schedule == "interleaved"
    expected = f"chunks {stages} apart" if stages else "chunks on the same or on other ranks"
    return MicrobatchError(
        f"chunks {one} and {other} of the model share ranks",
        at=op,
        got=f"ranks {common} with schedule {schedule}",
        expected=f"interleaved stages: {expected}" if interleaved else "each on ranks of its own",
        hint="let the chunks go round the stages in turn"
        if interleaved
        else "schedule=interleaved is what runs several chunks on one group of ranks",
    )


# --- checks ---------------------------------------------------------------------------------------


def verify_pipeline(job: Job) -> None:
    """Check the micro-batches of a job: a JobError where an op reads what is not there yet, or in
    another layout or at another rate than it is made.
    """
    pipeline = job.pipeline
    if pipeline is None:
        raise JobError(f"job {job.name!r} has no pipeline")
    made: dict[str, tuple[int, Sbp, bool]] = {}
    before = 0
    for op in job.ops:
        micro = op.micro
        if micro is None or not 0 <= micro.segment < len(pipeline.segments):
            raise JobError("an op has no segment", at=op)
        if micro.segment < before:
            raise JobError("ops are not in the order of their segments", op=op.name)
        before = micro.segment
        each_time = pipeline.segments[micro.segment].kind.per_microbatch
        for value, sbp in zip(op.inputs, micro.inputs, strict=True):
            _verify_read(op, value, sbp, each_time, made[value.name], pipeline)
        for value, sbp in zip(op.outputs, micro.outputs, strict=True):
            _verify_layout(op, value, sbp, each_time, pipeline.microbatches)
            own = each_time and not op_def(op.kind).collects
            made[value.name] = (micro.segment, sbp, own)


def _verify_read(
    op: Op,
    value: Value,
    sbp: Sbp,
    each_time: bool,
    made: tuple[int, Sbp, bool],
    pipeline: Pipeline,
) -> None:
    segment, layout, per_microbatch = made
    kind = pipeline.segments[segment].kind
    if layout != sbp:
        wrong = f"made {layout}, read {sbp} along micro-batches"
    elif per_microbatch and not each_time:
        wrong = f"made in every micro-batch ({kind}), read once per step"
    elif each_time and not per_microbatch and kind is not SegmentKind.PROLOGUE:
        wrong = f"complete after all micro-batches ({kind}), read in each"
    else:
        return
    raise JobError(
        "an op reads a value in a way that it is not made",
        at=op,
        got=f"%{value.name}: {wrong}",
    )


def _verify_layout(op: Op, value: Value, sbp: Sbp, each_time: bool, microbatches: int) -> None:
    uneven = isinstance(sbp, Split) and value.shape[sbp.axis] % microbatches
    if uneven or (sbp != BROADCAST and not each_time):
        raise JobError(
            "a value cannot lie like this along micro-batches",
            at=op,
            got=f"{value} as {sbp} for {microbatches} micro-batches",
        )
