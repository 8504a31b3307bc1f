"""What a pass is, and what all passes share: rewriting a job's ops."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from plancompiler.errors import UsageError
from plancompiler.ir import Job, Op, Value
from plancompiler.ir.settings import Settings


@dataclass(frozen=True, slots=True)
class PassResult:
    """What a pass gives back."""

    job: Job
    summary: str
    """One line: what it changed."""
    notes: tuple[str, ...] = ()
    """What it left alone, each with its reason."""
    changes: tuple[str, ...] = ()
    """What it changed where, where the summary does not say it."""


@dataclass(frozen=True, slots=True)
class Pass:
    """A rewrite of jobs, by name."""

    name: str
    function: Callable[..., PassResult]
    """Takes the job, and its settings where the pass has `options`."""
    options: type[Settings] | None = None
    default: bool = True
    """Whether it runs where the config names no passes."""

    def run(self, job: Job) -> PassResult:
        """A job that computes the same outputs and variables, and what was done."""
        return self.function(job, job.config) if self.options else self.function(job)


@dataclass(frozen=True, slots=True)
class PassRecord:
    """What a pass did to a job."""

    name: str
    summary: str
    notes: tuple[str, ...]
    ops_before: int
    ops_after: int
    changes: tuple[str, ...] = ()
    seconds: float = field(default=0.0, compare=False)
    """Wall time of the pass and of the verification of the job that came of it."""


def with_ops(job: Job, ops: Iterable[Op]) -> Job:
    """The job with other ops; the job itself where they are those that it has."""
    others = tuple(ops)
    if len(others) == len(job.ops) and all(map(operator.is_, others, job.ops)):
        return job
    return replace(job, ops=others)


def rewired(op: Op, instead: Mapping[str, Value]) -> Op:
    """The op, reading other values: those of `instead` by the name of what they stand for."""
    if not any(value.name in instead for value in op.inputs):
        return op
    return replace(op, inputs=tuple(instead.get(value.name, value) for value in op.inputs))


def readers_of(job: Job) -> dict[str, list[Op]]:
    """The ops that read each value, in order; an op that reads it twice is there once."""
    readers: dict[str, list[Op]] = {}
    for op in job.ops:
        for name in dict.fromkeys(value.name for value in op.inputs):
            readers.setdefault(name, []).append(op)
    return readers


def producers_of(job: Job) -> dict[str, Op]:
    """The op that makes each value."""
    return {value.name: op for op in job.ops for value in op.outputs}


def check_axes(job: Job, axes: Sequence[str], what: str, setting: str) -> None:
    """Every mesh axis that a setting names is an axis of some placement: a UsageError of `what`."""
    there = dict.fromkeys(name for op in job.ops for name in op.placement.axes or ())
    if not axes or not there.keys() >= set(axes):
        op = job.ops[0]
        raise UsageError(
            f"{what} splits along a mesh axis that the job does not have",
            at=op,
            got=f"{setting}={','.join(axes)}",
            expected=f"some of {', '.join(there)}" if there else "placements with named axes",
            hint=f"name the axes of the placements, and give their names as {setting}",
        )


def counted(count: int, what: str) -> str:
    """`1 op`, `2 ops`: for summaries."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
