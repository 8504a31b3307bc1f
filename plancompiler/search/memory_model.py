"""What candidates hold of a device's memory, as far as it can be said op by op.

The exact memory of a plan is that of its forecast. What is here steers the search towards it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from plancompiler.ir import Op, Phase, Value
from plancompiler.ir.shard import element_count
from plancompiler.ops.registry import op_def
from plancompiler.search.candidates import Candidates, pieces_of
from plancompiler.search.tied_ops import Reader, TiedGraph


def values_of_data(ops: Iterable[Op]) -> set[str]:
    """Values that follow from what is read: they shrink with micro-batches."""
    fed: set[str] = set()
    for op in ops:
        read = op.kind == "input" or op_def(op.kind).source
        if read or any(value.name in fed for value in op.inputs):
            fed.update(value.name for value in op.outputs)
    return fed


def with_held_bytes(tied: TiedGraph, candidates: Sequence[Candidates]) -> tuple[Candidates, ...]:
    """The candidates with what each makes a device hold for the whole step: variables, and what
    forward ops leave for backward.

    A parameter holds the states of its update that must lie as it does, too: they are split
    together or not at all.
    """
    values = [[op.outputs[0]] if op.kind == "variable" else [] for op, *_ in tied.classes]
    """What the ops of each class hold, in the layout of their first output."""
    with_parameter: set[tuple[int, int]] = set()
    for group in tied.groups:
        maker = tied.classes[group.maker][0]
        if maker.kind == "variable":
            for reader in group.readers if len(values[group.maker]) == 1 else ():
                states = _states(tied, candidates, reader, maker)
                values[group.maker] += [tied.classes[reader.ops][0].inputs[at] for at in states]
                with_parameter.update((reader.ops, at) for at in states)
        elif (
            group.slot == 0
            and maker.origin.phase is Phase.FORWARD
            and not op_def(maker.kind).view
            and any(
                tied.classes[each.ops][0].origin.phase is Phase.BACKWARD for each in group.readers
            )
        ):
            values[group.maker] = [maker.outputs[0]]
    for group in tied.groups:
        if any((each.ops, each.operand) in with_parameter for each in group.readers):
            values[group.maker] = []
    return tuple(
        replace(each, held_bytes=_held(op, sum(map(_bytes, held)), each))
        for (op, *_), held, each in zip(tied.classes, values, candidates, strict=True)
    )


def _states(
    tied: TiedGraph, candidates: Sequence[Candidates], reader: Reader, parameter: Op
) -> list[int]:
    """The operands of an update that lie as the parameter which it reads."""
    op = tied.classes[reader.ops][0]
    changed = [source for _, source in op_def(op.kind).mutates]
    if changed[:1] != [reader.operand] or op.placement.hierarchy != parameter.placement.hierarchy:
        return []
    signatures = candidates[reader.ops].signatures
    return [
        at
        for at in changed[1:]
        if all(each.inputs[at] == each.inputs[reader.operand] for each in signatures)
    ]


def _held(op: Op, nbytes: int, candidates: Candidates) -> np.ndarray:
    """What is left on a device of so many bytes in the layouts of an op's first output."""
    hierarchy = op.placement.hierarchy
    return np.array(
        [
            nbytes / pieces_of(each.outputs[0], hierarchy) if nbytes else 0.0
            for each in candidates.signatures
        ]
    )


def with_split_parameters(
    tied: TiedGraph, candidates: tuple[Candidates, ...]
) -> tuple[Candidates, ...]:
    """The candidates that have large parameters, and what forward computation reads of them, in as
    many pieces as any candidate has them.

    Without that a search for the least time splits the batch over all devices, and gathers
    parameters as a whole, which a step of several micro-batches then holds all the time.
    """
    fed = values_of_data(tied.job.ops)
    sizes = [_bytes(op.outputs[0]) for op in tied.job.ops if op.kind == "variable"]
    least = LARGE * max(sizes, default=0)
    kept = []
    for members, each in zip(tied.classes, candidates, strict=True):
        op = members[0]
        hierarchy = op.placement.hierarchy
        places: list[int] = []
        if op.origin.phase is Phase.FORWARD and op.inputs:
            places = [
                place
                for place, value in enumerate(op.inputs)
                if value.name not in fed and _bytes(value) >= least
            ]
        elif op.kind == "variable" and _bytes(op.outputs[0]) >= least:
            places = [-1]
        for place in places:
            pieces = [
                pieces_of(each_one.inputs[place] if place >= 0 else each_one.outputs[0], hierarchy)
                for each_one in each.signatures
            ]
            each = each.where([count == max(pieces) for count in pieces])
        kept.append(each)
    return tuple(kept)


LARGE = 0.1
"""Of the largest parameter: the size from which parameters are large."""


def _bytes(value: Value) -> int:
    return element_count(value.shape) * value.dtype.itemsize
