"""Ops that do alike, such as those of repeated layers, as one: the search decides about them once.

Two ops are alike if they say the same, and so do all ops within a few steps of them (colour
refinement of B. Weisfeiler and A. Leman, 1968, cut off after some rounds). Layers in the middle of
a model are then alike, whatever their number; those near its ends are not.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plancompiler.boxing.infer_sbp import over_microbatches
from plancompiler.costs import Machine, links_of, machine_of_job
from plancompiler.ir import Job, Op, Placement

IGNORED = frozenset({"init", "init_args", "key", "name", "seed"})
"""Attributes that tell ops of repeated layers apart, and on which no layout depends."""


@dataclass(frozen=True, slots=True)
class Reader:
    """An operand of alike ops that read a value."""

    ops: int
    """Number of the class of ops."""
    operand: int
    times: int
    """How many such ops read one value."""


@dataclass(frozen=True, slots=True)
class ValueGroup:
    """Values with alike makers and alike readers."""

    maker: int
    """Number of the class of ops that make them."""
    slot: int
    readers: tuple[Reader, ...]
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Context:
    """Alike ops whose operands and results are also in equal groups."""

    ops: int
    """Number of the class of ops."""
    reads: tuple[int, ...]
    """The group of each input."""
    makes: tuple[int, ...]
    """The group of each output; -1 for one that nobody reads."""
    count: int


@dataclass(frozen=True)
class TiedGraph:
    """A job's ops by classes, and its values by groups."""

    job: Job
    class_of: tuple[int, ...]
    """The class of each op of the job."""
    classes: tuple[tuple[Op, ...], ...]
    groups: tuple[ValueGroup, ...]
    contexts: tuple[Context, ...]


def tie_ops(job: Job, rounds: int | None) -> TiedGraph:
    """The job's ops by classes, after so many rounds; None: every op is a class of its own."""
    ops = job.ops
    return _tied(job, range(len(ops)) if rounds is None else _colours(job, rounds))


def _tied(job: Job, colours: Sequence[int]) -> TiedGraph:
    ops = job.ops
    members: list[list[Op]] = [[] for _ in range(max(colours, default=-1) + 1)]
    for op, colour in zip(ops, colours, strict=True):
        members[colour].append(op)
    readers: dict[str, dict[tuple[int, int], int]] = {}
    for op, colour in zip(ops, colours, strict=True):
        for operand, value in enumerate(op.inputs):
            counts = readers.setdefault(value.name, {})
            counts[colour, operand] = counts.get((colour, operand), 0) + 1
    names: dict[tuple[int, int, tuple[tuple[tuple[int, int], int], ...]], list[str]] = {}
    for op, colour in zip(ops, colours, strict=True):
        for slot, value in enumerate(op.outputs):
            if value.name in readers:
                read = tuple(sorted(readers[value.name].items()))
                names.setdefault((colour, slot, read), []).append(value.name)
    groups = tuple(
        ValueGroup(
            maker, slot, tuple([Reader(*place, times) for place, times in read]), tuple(values)
        )
        for (maker, slot, read), values in names.items()
    )
    group_of = {name: number for number, group in enumerate(groups) for name in group.names}
    keys = [
        (
            colour,
            tuple([group_of[value.name] for value in op.inputs]),
            tuple([group_of.get(value.name, -1) for value in op.outputs]),
        )
        for op, colour in zip(ops, colours, strict=True)
    ]
    contexts = Counter(keys)
    return TiedGraph(
        job,
        tuple(colours),
        tuple(map(tuple, members)),
        groups,
        tuple(Context(*key, count) for key, count in contexts.items()),
    )


def _colours(job: Job, rounds: int) -> list[int]:
    ops, machine = job.ops, machine_of_job(job)
    placements = dict.fromkeys(op.placement for op in ops)
    meshes = dict(
        zip(
            placements,
            _numbered([_mesh_as_priced(machine, each) for each in placements]),
            strict=True,
        )
    )
    types: dict[object, int] = {}
    type_of: dict[str, int] = {}
    maker: dict[str, tuple[int, int]] = {}
    readers: list[list[tuple[int, int, int]]] = [[] for _ in ops]
    for place, op in enumerate(ops):
        for operand, value in enumerate(op.inputs):
            readers[maker[value.name][0]].append((maker[value.name][1], place, operand))
        for slot, value in enumerate(op.outputs):
            maker[value.name] = place, slot
            # Enums are hashed by their names, which would take longer than all else of this.
            key = value.shape, value.dtype.value
            type_of[value.name] = types.setdefault(key, len(types))
    sources = [[maker[value.name] for value in op.inputs] for op in ops]
    colours = _numbered([_said(op, meshes, type_of) for op in ops])
    for _ in range(rounds):
        colours = _numbered(
            [
                (
                    own,
                    tuple([(colours[place], slot) for place, slot in read]),
                    tuple(sorted([(slot, colours[at], operand) for slot, at, operand in used])),
                )
                for own, read, used in zip(colours, sources, readers, strict=True)
            ]
        )
    return colours


def _mesh_as_priced(machine: Machine, mesh: Placement) -> object:
    """What two meshes have in common on which the same layouts cost the same: pipeline stages."""
    links = links_of(machine, mesh)
    subsets = [
        tuple(axis for axis in range(mesh.ndim) if bits >> axis & 1)
        for bits in range(1, 1 << mesh.ndim)
    ]
    return mesh.device_type, mesh.hierarchy, mesh.axes, tuple(map(links.along, subsets))


def _said(op: Op, meshes: Mapping[Placement, int], type_of: Mapping[str, int]) -> object:
    """All of an op on which its layouts and their prices depend."""
    attrs = op.attrs
    if any(name in IGNORED for name, _ in attrs):
        attrs = tuple([each for each in attrs if each[0] not in IGNORED])
    # Variables of one role in repeated layers differ by numbers in their names.
    name = re.sub(r"\d+", "*", str(op.attr("name"))) if op.kind == "variable" else ""
    return (
        op.kind,
        name,
        attrs,
        tuple([type_of[value.name] for value in op.inputs]),
        tuple([type_of[value.name] for value in op.outputs]),
        meshes[op.placement],
        any(value.placement != op.placement for value in op.inputs),
        op.sbp,
        over_microbatches(op),
        op.origin.phase.value,
    )


def _numbered(keys: Sequence[object]) -> list[int]:
    numbers: dict[object, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]
