"""`RankTaskGraph`: the tasks and registers of one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from plancompiler.boxing.graph import RankSlice
from plancompiler.ir import DType, NdSbp, SourceLine
from plancompiler.ir.task import TaskKind
from plancompiler.plan.plan import (
    Communicator,
    OutputDesc,
    RemoteRegister,
    Stream,
    TaskSpec,
    VariableDesc,
)

HOST = "cpu"
"""Device type of host memory."""


@dataclass(frozen=True, slots=True)
class RankTask:
    """One task of the rank."""

    id: int
    family: int
    kind: TaskKind
    name: str
    op_kind: str
    """Key into the op table; empty for transport."""
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    spec: TaskSpec
    source: SourceLine
    late: bool = False
    """Whether it waits for the compute task before it in plan order."""
    segment: int = 0
    """Index into the segments of the job's pipeline."""
    stream: Stream | None = None
    """Set for collectives; of other tasks their kind says it."""


class RankRegister(NamedTuple):
    """One output buffer of a task of the rank."""

    id: int
    name: str
    shape: tuple[int, ...]
    dtype: DType
    sbp: NdSbp
    producer: int
    remote_consumers: tuple[int, ...] = ()
    """CopyCommNet tasks of other ranks, by id."""
    sync_id: int = -1
    per_microbatch: bool = False
    device: str = HOST
    """Device type of the memory that it lies in."""


@dataclass(frozen=True)
class RankTaskGraph:
    """All tasks of one rank in global order, with their registers."""

    rank: int
    rank_slice: RankSlice
    tasks: tuple[RankTask, ...]
    registers: Mapping[int, RankRegister]
    consumers: Mapping[int, tuple[int, ...]]
    """Register → tasks of this rank that read it, in order; left out where there are none."""
    remote_registers: tuple[RemoteRegister, ...]
    communicators: tuple[Communicator, ...]
    variables: tuple[VariableDesc, ...]
    outputs: tuple[OutputDesc, ...]
