"""The choice of layouts as a linear program.

A column per class of alike ops and candidate says whether it is chosen; a class chooses one. Every
reader of a value draws a flow from the layout that the maker chose to the one that the reader
chose, over the arcs of the tensor's layout graph; readers share an arc at the price of one. This is
the flow formulation of directed Steiner trees (R. Wong, 1984).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from plancompiler.costs import Machine, links_of, machine_of_job
from plancompiler.ir import Job, NdSbp, Partial, Phase, Split
from plancompiler.ops.registry import op_def
from plancompiler.search.candidates import Candidates, candidates_of
from plancompiler.search.dominated import without_dominated
from plancompiler.search.layout_arcs import LayoutArcs, layout_arcs
from plancompiler.search.memory_model import with_held_bytes, with_split_parameters
from plancompiler.search.tied_ops import TiedGraph, ValueGroup


@dataclass(frozen=True)
class GroupArcs:
    """A group of values in the program."""

    arcs: LayoutArcs
    made: np.ndarray
    """The layout of each candidate of the maker."""
    wanted: tuple[np.ndarray, ...]
    """Per reader, the layout that each of its candidates wants."""
    fixed: tuple[bool, ...]
    """Per reader, whether it takes the value as it is made: what it updates in place."""
    times: int
    """Values in the group."""


@dataclass(frozen=True)
class LayoutProblem:
    """What the search decides about, and what it costs."""

    tied: TiedGraph
    candidates: tuple[Candidates, ...]
    """Per class."""
    groups: tuple[GroupArcs, ...]
    """Those of `tied.groups`; readers on meshes of other shapes are left out."""
    readers: tuple[tuple[int, ...], ...]
    """Per group, the places of its readers in `tied`."""


def layout_problem(
    tied: TiedGraph,
    with_dominated: bool = False,
    without: tuple[str, NdSbp] | None = None,
    split_parameters: bool = False,
    whole: Mapping[str, int] | None = None,
) -> LayoutProblem:
    """The candidates and prices of a job; those that need not be looked at only on demand.
    `without` names a value and a layout that it, and all that are like it, must not have. With
    `split_parameters` large parameters are in as many pieces as can be. `whole` has axes of values,
    by their names, that are not split.
    """
    job = tied.job
    machine = machine_of_job(job)
    microbatches = 1 if job.pipeline is None else job.pipeline.microbatches
    candidates = tuple(candidates_of(members[0], microbatches, machine) for members in tied.classes)
    if whole:
        candidates = _with_whole(tied, candidates, whole)
    if not with_dominated:
        candidates = without_dominated(tied, _agreeing(tied, candidates))
    if without is not None:
        candidates = _without(tied, candidates, *without)
    if split_parameters:
        candidates = with_split_parameters(tied, candidates)
    groups, readers = [], []
    gradients = _gradients(job)
    for group in tied.groups:
        starting = _starting(tied, group, gradients, machine)
        made, used = _group_arcs(tied, candidates, group, machine, starting)
        groups.append(made)
        readers.append(used)
    return LayoutProblem(tied, with_held_bytes(tied, candidates), tuple(groups), tuple(readers))


def _agreeing(tied: TiedGraph, candidates: tuple[Candidates, ...]) -> tuple[Candidates, ...]:
    """Those that give what is updated in place a layout which its maker and its updates allow."""
    kept = list(candidates)
    for group in tied.groups:
        for reader in group.readers:
            op = tied.classes[reader.ops][0]
            if all(source != reader.operand for _, source in op_def(op.kind).mutates):
                continue
            made = [each.outputs[group.slot] for each in kept[group.maker].signatures]
            taken = [each.inputs[reader.operand] for each in kept[reader.ops].signatures]
            both = set(made) & set(taken)
            kept[group.maker] = kept[group.maker].where([each in both for each in made])
            kept[reader.ops] = kept[reader.ops].where([each in both for each in taken])
    return tuple(kept)


def _without(
    tied: TiedGraph, candidates: tuple[Candidates, ...], name: str, layout: NdSbp
) -> tuple[Candidates, ...]:
    for place, op in enumerate(tied.job.ops):
        for slot, value in enumerate(op.outputs):
            if value.name == name:
                number = tied.class_of[place]
                each = candidates[number]
                keep = [signature.outputs[slot] != layout for signature in each.signatures]
                return (*candidates[:number], each.where(keep), *candidates[number + 1 :])
    return candidates


def _with_whole(
    tied: TiedGraph, candidates: tuple[Candidates, ...], whole: Mapping[str, int]
) -> tuple[Candidates, ...]:
    kept = []
    for members, each in zip(tied.classes, candidates, strict=True):
        op = members[0]
        cut = [
            Split(whole[value.name]) if value.name in whole else None
            for value in (*op.inputs, *op.outputs)
        ]
        keep = [
            not any(
                axis is not None and axis in sbp.entries
                for axis, sbp in zip(cut, (*signature.inputs, *signature.outputs), strict=True)
            )
            for signature in each.signatures
        ]
        kept.append(each.where(keep) if any(keep) else each)
    return tuple(kept)


def _gradients(job: Job) -> list[str]:
    """The values that the backward computation gives to updates, in its order."""
    read = {value.name for op in job.ops if op.origin.phase is Phase.UPDATE for value in op.inputs}
    return [
        value.name
        for op in job.ops
        if op.origin.phase is Phase.BACKWARD
        for value in op.outputs
        if value.name in read
    ]


def _starting(
    tied: TiedGraph, group: ValueGroup, gradients: Sequence[str], machine: Machine
) -> float:
    """The part of starting a reduction that each of such values pays.

    What only updates read, and what only leaves a job that trains, such as a loss, is reduced with
    other gradients, in buckets that start while the backward computation goes on. Where streams
    take long to go on, that counts: as one start of which each gradient pays its part, and one of
    the last gradient, after whose bucket nothing comes that could hide it.
    """
    maker = tied.classes[group.maker][0]
    readers = [tied.classes[each.ops][0] for each in group.readers]
    if not gradients:
        return 1.0
    if {each.kind for each in readers} == {"output"}:
        return 0.0
    phases = {each.origin.phase for each in readers}
    if maker.origin.phase is not Phase.BACKWARD or phases != {Phase.UPDATE}:
        return 1.0
    if not machine.host.wake_seconds:
        return 0.0
    return 1.0 / len(group.names if gradients[-1] in group.names else gradients)


def _group_arcs(
    tied: TiedGraph,
    candidates: Sequence[Candidates],
    group: ValueGroup,
    machine: Machine,
    starting: float,
) -> tuple[GroupArcs, tuple[int, ...]]:
    """A group's arcs and the places of its readers. `starting`: see `layout_arcs`."""
    maker = tied.classes[group.maker][0]
    value = maker.outputs[group.slot]
    made = [each.outputs[group.slot] for each in candidates[group.maker].signatures]
    used, wanted, fixed = [], [], []
    for place, reader in enumerate(group.readers):
        op = tied.classes[reader.ops][0]
        if op.placement.hierarchy != maker.placement.hierarchy:
            continue
        used.append(place)
        wanted.append([each.inputs[reader.operand] for each in candidates[reader.ops].signatures])
        fixed.append(any(kept == reader.operand for _, kept in op_def(op.kind).mutates))
    layouts = {*made, *(layout for each in wanted for layout in each)}
    partials = {entry for each in layouts for entry in each if isinstance(entry, Partial)}
    arcs = layout_arcs(
        value.shape,
        value.dtype,
        maker.placement.hierarchy,
        tuple(sorted(partials, key=str)),
        tuple(sorted((each for each in layouts if each.has_halo), key=str)),
        starting,
        links_of(machine, maker.placement),
    )

    def numbers(each: Sequence[NdSbp]) -> np.ndarray:
        return np.array([arcs.number_of[layout] for layout in each], int)

    known = GroupArcs(
        arcs, numbers(made), tuple(map(numbers, wanted)), tuple(fixed), len(group.names)
    )
    return known, tuple(used)


@dataclass(frozen=True)
class LinearProgram:
    """Minimise `costs @ x` where `lower <= matrix @ x <= upper` and `0 <= x <= 1`."""

    costs: np.ndarray
    rows: np.ndarray
    columns: np.ndarray
    values: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    choices: int
    """The first so many columns are those of candidates; the others are flows."""
    first_choice: np.ndarray
    """Per class, its first column."""
    memory_row: int | None


class _Writer:
    def __init__(self) -> None:
        self.rows: list[np.ndarray] = []
        self.columns: list[np.ndarray] = []
        self.values: list[np.ndarray] = []
        self.costs: list[np.ndarray] = []
        self.lower: list[np.ndarray] = []
        self.upper: list[np.ndarray] = []
        self.row_count = self.column_count = 0

    def add_rows(self, count: int, lower: float, upper: float) -> int:
        self.lower.append(np.full(count, lower))
        self.upper.append(np.full(count, upper))
        self.row_count += count
        return self.row_count - count

    def add_columns(self, costs: np.ndarray) -> int:
        self.costs.append(costs)
        self.column_count += len(costs)
        return self.column_count - len(costs)

    def add(self, rows: np.ndarray, columns: np.ndarray, value: float | np.ndarray) -> None:
        self.rows.append(rows)
        self.columns.append(columns)
        self.values.append(np.broadcast_to(np.asarray(value, float), rows.shape))


def linear_program(problem: LayoutProblem, memory_bytes: float | None) -> LinearProgram:
    """The program of a problem, for devices with so much memory."""
    tied, writer = problem.tied, _Writer()
    first_choice = []
    for members, candidates in zip(tied.classes, problem.candidates, strict=True):
        count = len(candidates.signatures)
        column = writer.add_columns(candidates.seconds * len(members))
        row = writer.add_rows(1, 1.0, 1.0)
        writer.add(np.full(count, row), np.arange(column, column + count), 1.0)
        first_choice.append(column)
    choices = writer.column_count
    memory_row = None
    if memory_bytes is not None:
        memory_row = writer.add_rows(1, -np.inf, 1.0)
        for column, members, candidates in zip(
            first_choice, tied.classes, problem.candidates, strict=True
        ):
            if candidates.held_bytes.any():
                count = len(candidates.signatures)
                held = candidates.held_bytes * len(members) / memory_bytes
                writer.add(np.full(count, memory_row), column + np.arange(count), held)
    for group, arcs, used in zip(tied.groups, problem.groups, problem.readers, strict=True):
        _add_group(writer, group, arcs, used, first_choice)
    return LinearProgram(
        np.concatenate(writer.costs),
        np.concatenate(writer.rows),
        np.concatenate(writer.columns),
        np.concatenate(writer.values),
        np.concatenate(writer.lower),
        np.concatenate(writer.upper),
        choices,
        np.array(first_choice),
        memory_row,
    )


def _add_group(
    writer: _Writer,
    group: ValueGroup,
    arcs: GroupArcs,
    used: Sequence[int],
    first_choice: Sequence[int],
) -> None:
    graph = arcs.arcs
    count, steps = graph.count, len(graph.seconds)
    costs = graph.seconds * arcs.times
    flowing = sum(not fixed for fixed in arcs.fixed)
    shared = writer.add_columns(costs) if flowing > 1 else None
    for place, wanted, fixed in zip(used, arcs.wanted, arcs.fixed, strict=True):
        # Of each layout: made + what flows in - what flows out = wanted.
        row = writer.add_rows(count, 0.0, 0.0)
        made_columns = first_choice[group.maker] + np.arange(len(arcs.made))
        writer.add(row + arcs.made, made_columns, 1.0)
        reader = group.readers[place]
        writer.add(row + wanted, first_choice[reader.ops] + np.arange(len(wanted)), -1.0)
        if fixed:
            continue
        flow = writer.add_columns(costs if shared is None else np.zeros(steps))
        columns = flow + np.arange(steps)
        writer.add(row + graph.heads, columns, 1.0)
        writer.add(row + graph.tails, columns, -1.0)
        if shared is not None:
            least = writer.add_rows(steps, 0.0, np.inf)
            below = least + np.arange(steps)
            writer.add(below, shared + np.arange(steps), 1.0)
            writer.add(below, columns, -1.0)


def column_count(problem: LayoutProblem) -> int:
    """The columns of a problem's program."""
    count = sum(len(each.signatures) for each in problem.candidates)
    for arcs in problem.groups:
        flowing = sum(not fixed for fixed in arcs.fixed)
        count += len(arcs.arcs.seconds) * (flowing + (flowing > 1))
    return count
