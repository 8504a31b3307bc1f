"""`Job`: a traced program, frozen; and its text form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from plancompiler.errors import JobError
from plancompiler.ir.config import DEFAULT_CONFIG, Config
from plancompiler.ir.op import AttrValue
from plancompiler.ir.pipeline import Pipeline
from plancompiler.ir.value import Op, Value


@dataclass(frozen=True)
class Job:
    """Ops in topological order, and the named outputs. Inputs are the ops of kind `input`."""

    name: str
    ops: tuple[Op, ...]
    seed: int = 0
    """Seed of initialisers, dropout and data order."""
    config: Config = DEFAULT_CONFIG
    """How the job wants to be compiled."""
    pipeline: Pipeline | None = None
    """Set by the pass `microbatch` where a step has several micro-batches."""
    rates: Mapping[int, Callable[[int], float]] = field(
        default_factory=dict, compare=False, repr=False
    )
    """Learning rates that are functions of the user's, by the number of their optimizer. They stay
    where the job was traced: who runs it from there feeds their values.
    """

    @cached_property
    def inputs(self) -> dict[str, Value]:
        """Values that the caller feeds, by name."""
        return {str(op.attr("name")): op.outputs[0] for op in self.ops if op.kind == "input"}

    @cached_property
    def outputs(self) -> dict[str, Value]:
        """Values that each step reports, by name."""
        return {str(op.attr("name")): op.inputs[0] for op in self.ops if op.kind == "output"}

    @cached_property
    def variables(self) -> dict[str, Value]:
        """Values that live from step to step, by name."""
        return {str(op.attr("name")): op.outputs[0] for op in self.ops if op.kind == "variable"}

    @cached_property
    def world_size(self) -> int:
        """One more than the highest rank in use."""
        placements = {op.placement for op in self.ops}
        return 1 + max((max(placement.rank_list) for placement in placements), default=-1)

    def __str__(self) -> str:
        config = str(self.config)
        lines = [f"job {self.name} (seed {self.seed})" + (f" {config}" if config else "")]
        for op in self.ops:
            results = ", ".join(str(value) for value in op.outputs)
            arguments = ", ".join(f"%{value.name}" for value in op.inputs)
            attrs = "".join(f" {key}={format_attr(value)}" for key, value in op.attrs)
            sbp = "" if op.sbp is None else f" {op.sbp}"
            head = f"{results} = " if results else ""
            lines.append(
                f"  {head}{op.kind}({arguments}){attrs} @{op.placement}{sbp}  # {op.source}"
            )
        return "\n".join(lines) + "\n"


def format_attr(value: AttrValue) -> str:
    """One text form for an attribute's value."""
    if isinstance(value, tuple):
        return "(" + ",".join(format_attr(item) for item in value) + ")"
    return repr(value)


def verify_job(job: Job) -> None:
    """Check that a job is whole: names unique, producers before consumers, at least one output."""
    made: set[str] = set()
    names: set[str] = set()
    for op in job.ops:
        if op.name in names:
            raise JobError("two ops have one name", op=op.name, source=op.source)
        names.add(op.name)
        for value in op.inputs:
            if value.name not in made:
                raise JobError(
                    "an op reads a value that no earlier op makes",
                    op=op.name,
                    source=op.source,
                    got=f"%{value.name}",
                )
        for value in op.outputs:
            if value.name in made:
                raise JobError(
                    "two ops make one value", op=op.name, source=op.source, got=f"%{value.name}"
                )
            made.add(value.name)
    for kind in ("input", "output", "variable"):
        seen: set[str] = set()
        for op in job.ops:
            if op.kind == kind:
                label = str(op.attr("name"))
                if label in seen:
                    raise JobError(
                        f"two {kind}s have one name",
                        op=op.name,
                        source=op.source,
                        got=repr(label),
                        hint="give each a name of its own",
                    )
                seen.add(label)
    if not job.outputs:
        raise JobError(
            f"job {job.name!r} has no output, so a run would have nothing to report",
            expected="at least one output",
            hint="call pc.output(name, value) inside the job",
        )
