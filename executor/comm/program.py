"""What goes from whom to whom in a collective: one description for plans and for communicators.

Every collective has one form. Its givers offer their input, whole or a part for each reader; each
reader takes what is for it from every giver, and reduces it, joins it, or keeps it as it is. NumPy
does that over memory that it can read, NCCL by calls on flat buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from plancompiler.errors import ExecutionError
from plancompiler.ir import Reduction
from plancompiler.ir.shard import balanced_range
from plancompiler.ir.task import Primitive
from plancompiler.plan.plan import CollectiveSpec

Index = tuple[slice, ...]
Range = tuple[int, int]

EACH = -1
"""In place of an axis: the input is an array for each reader."""


class Program(NamedTuple):
    """How the members of a group take part in a collective; the same on all of them.

    Members are named by their position in the group.
    """

    how: Reduction | None = None
    """How a reader reduces what it takes, in the order of the givers; None where it only moves."""
    cut: int | None = None
    """The axis along which an input is cut into balanced parts, one for each reader, or EACH; None
    where all readers take the whole."""
    join: int | None = None
    """The axis along which a reader joins what it takes, in the order of the givers."""
    reader: int | None = None
    """The only one that takes anything; None where all do."""
    giver: int | None = None
    """The only one that gives anything; None where all do."""

    def readers(self, members: int) -> Sequence[int]:
        """Those that take something, among so many members."""
        return range(members) if self.reader is None else (self.reader,)

    def givers(self, members: int) -> Sequence[int]:
        """Those that give something."""
        return range(members) if self.giver is None else (self.giver,)


def program_of(spec: CollectiveSpec) -> Program:
    """The program of a plan's collective."""
    scatters = spec.primitive in (Primitive.REDUCE_SCATTER, Primitive.ALL_TO_ALL)
    gathers = spec.primitive in (Primitive.ALL_GATHER, Primitive.ALL_TO_ALL)
    if not (scatters or gathers) and spec.primitive is not Primitive.ALL_REDUCE:
        raise ExecutionError("not a collective", got=str(spec.primitive))
    return Program(
        None if gathers else spec.reduction or Reduction.SUM,
        spec.dst_axis if scatters else None,
        spec.src_axis if gathers else None,
    )


def balanced(extent: int, members: int) -> list[Range]:
    """The part of each member along an axis of this extent."""
    return [balanced_range(extent, members, member) for member in range(members)]


def part_index(axis: int, part: Range) -> Index:
    """What indexes a part of an array along an axis."""
    return (*(slice(None),) * axis, slice(*part))
