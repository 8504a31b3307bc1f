"""Ops that do alike, such as those of repeated layers, as one: the search decides about them once.

Two ops are alike if they say the same, and so do all ops within a few steps of them (colour
refinement of B. Weisfeiler and A. Leman, 1968, cut off after some rounds). Layers in the middle of
a model are then alike, whatever their number; those near its ends are not.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from plancompiler.boxing.infer_sbp import over_microbatches
from plancompiler.ir import Job, Op

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
    return _tied(job, range(len(ops)) if rounds is None else _colours(ops, rounds))


def _tied(job: Job, colours: Sequence[int]) -> TiedGraph:
    ops = job.ops
    members: list[list[Op]] = [[] for _ in range(max(colours, default=-1) + 1)]
    for op, colour in zip(ops, colours, strict=True):
        members[colour].append(op)
    readers: dict[str, Counter[tuple[int, int]]] = {}
    for op, colour in zip(ops, colours, strict=True):
        for operand, value in enumerate(op.inputs):
            readers.setdefault(value.name, Counter())[colour, operand] += 1
    names: dict[tuple[int, int, tuple[Reader, ...]], list[str]] = {}
    for op, colour in zip(ops, colours, strict=True):
        for slot, value in enumerate(op.outputs):
            if value.name in readers:
                counts = sorted(readers[value.name].items())
                read = tuple([Reader(*place, times) for place, times in counts])
                names.setdefault((colour, slot, read), []).append(value.name)
    groups = tuple(ValueGroup(*key, tuple(values)) for key, values in names.items())
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


def _colours(ops: Sequence[Op], rounds: int) -> list[int]:
    maker: dict[str, tuple[int, int]] = {}
    readers: list[list[tuple[int, int, int]]] = [[] for _ in ops]
    for place, op in enumerate(ops):
        for operand, value in enumerate(op.inputs):
            readers[maker[value.name][0]].append((maker[value.name][1], place, operand))
        for slot, value in enumerate(op.outputs):
            maker[value.name] = place, slot
    sources = [[maker[value.name] for value in op.inputs] for op in ops]
    colours = _numbered([_said(op) for op in ops])
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


def _said(op: Op) -> object:
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
        op.input_types,
        op.output_types,
        op.placement,
        op.sbp,
        over_microbatches(op),
        op.origin.phase,
    )


def _numbered(keys: Sequence[object]) -> list[int]:
    numbers: dict[object, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]
