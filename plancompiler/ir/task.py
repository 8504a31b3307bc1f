"""Task kinds and ids: what a plan's tasks are called, and the numbers that all ranks agree on.

Ids are pure functions: `task_id = (rank, family, lane)` and `register_desc_id = (rank, family,
lane, slot)`, packed in 63 bits. Any rank can compute the id of any other rank's task without
asking.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from plancompiler.errors import IdOverflowError


class TaskKind(enum.Enum):
    """What a task does. Compute kinds first, then transport kinds."""

    COMPUTE = "Compute"
    INPUT = "Input"
    VARIABLE = "Variable"
    OUTPUT = "Output"
    COLLECTIVE_BOXING = "CollectiveBoxing"
    COPY_COMM_NET = "CopyCommNet"
    COPY_HD = "CopyHd"
    SEND_RECV = "SendRecv"
    SLICE_BOXING = "SliceBoxing"
    BOXING_ZEROS = "BoxingZeros"
    BOXING_IDENTITY = "BoxingIdentity"
    STEP_END = "StepEnd"

    def __str__(self) -> str:
        return str(self.value)


CROSSING = frozenset({TaskKind.COPY_COMM_NET, TaskKind.SEND_RECV})
"""Kinds of tasks that read a register of another rank: through host memory, or between devices."""


class Primitive(enum.Enum):
    """One step of a layout change."""

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    ALL_TO_ALL = "all_to_all"
    SLICE = "slice"
    PARTIALISE = "partialise"
    COPY = "copy"
    EXCHANGE = "exchange"

    def __str__(self) -> str:
        return str(self.value)


RANK_BITS = 20
FAMILY_BITS = 22
LANE_BITS = 14
SLOT_BITS = 7

assert RANK_BITS + FAMILY_BITS + LANE_BITS + SLOT_BITS == 63

CONTROL_SLOT = (1 << SLOT_BITS) - 1
"""Slot of a task's control register; its outputs have the slots below."""


class RegisterId(NamedTuple):
    """The fields of a register descriptor id; with slot 0, also those of a task id."""

    rank: int
    family: int
    lane: int
    slot: int


_FIELDS = (("rank", RANK_BITS), ("family", FAMILY_BITS), ("lane", LANE_BITS), ("slot", SLOT_BITS))


def pack_register_id(rank: int, family: int, lane: int = 0, slot: int = 0) -> int:
    """The 63-bit id of a register descriptor; an error names the field that does not fit."""
    if (
        0 <= rank < 1 << RANK_BITS
        and 0 <= family < 1 << FAMILY_BITS
        and 0 <= lane < 1 << LANE_BITS
        and 0 <= slot < 1 << SLOT_BITS
    ):
        return ((rank << FAMILY_BITS | family) << LANE_BITS | lane) << SLOT_BITS | slot
    value, name, bits = next(
        (value, name, bits)
        for value, (name, bits) in zip((rank, family, lane, slot), _FIELDS, strict=True)
        if not 0 <= value < 1 << bits
    )
    raise IdOverflowError(
        f"the {name} does not fit its field of an id",
        got=value,
        expected=f"0 to {(1 << bits) - 1} ({bits} bits)",
    )


def require_rank_fits(rank: int) -> None:
    """An IdOverflowError for a rank that no id can hold."""
    pack_register_id(rank, 0)


def pack_task_id(rank: int, family: int, lane: int = 0) -> int:
    """The id of a task: that of its register in slot 0, so that order and fields are shared."""
    return pack_register_id(rank, family, lane, 0)


def unpack_id(packed: int) -> RegisterId:
    """The fields of a task or register descriptor id."""
    fields = []
    for _, bits in reversed(_FIELDS):
        fields.append(packed & ((1 << bits) - 1))
        packed >>= bits
    return RegisterId(*reversed(fields))


def rank_of(packed: int) -> int:
    """The rank in a task or register descriptor id."""
    return packed >> (FAMILY_BITS + LANE_BITS + SLOT_BITS)


def family_of(packed: int) -> int:
    """The family in a task or register descriptor id."""
    return packed >> (LANE_BITS + SLOT_BITS) & (1 << FAMILY_BITS) - 1


def format_id(packed: int) -> str:
    """`rank.family.lane.slot`, the form in which texts and errors show ids."""
    return ".".join(map(str, unpack_id(packed)))
