"""What candidates hold of a device's memory, as far as it can be said op by op.

The exact memory of a plan is that of its forecast. What is here steers the search towards it.
"""

from __future__ import annotations

from collections.abc import Iterable

from plancompiler.ir import Op, Phase, Value
from plancompiler.ir.shard import element_count
from plancompiler.ops.registry import op_def
from plancompiler.search.candidates import Candidates, pieces_of
from plancompiler.search.tied_ops import TiedGraph


def values_of_data(ops: Iterable[Op]) -> set[str]:
    """Values that follow from what is read: they shrink with micro-batches."""
    fed: set[str] = set()
    for op in ops:
        read = op.kind == "input" or op_def(op.kind).source
        if read or any(value.name in fed for value in op.inputs):
            fed.update(value.name for value in op.outputs)
    return fed


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
