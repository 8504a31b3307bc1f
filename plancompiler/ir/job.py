"""`Job`: a traced program, frozen; and its text form."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from plancompiler.errors import JobError
from plancompiler.ir.op import NO_ORIGIN, UNKNOWN_SOURCE, AttrValue
from plancompiler.ir.pipeline import Pipeline
from plancompiler.ir.settings import Settings, default_settings
from plancompiler.ir.value import Op, Value


@dataclass(frozen=True)
class Job:
    """Ops in topological order, and the named outputs. Inputs are the ops of kind `input`."""

    name: str
    ops: tuple[Op, ...]
    seed: int = 0
    """Seed of initialisers, dropout and data order."""
    config: Settings = field(default_factory=default_settings)
    """How the job wants to be compiled."""
    pipeline: Pipeline | None = None
    """Set by the pass `microbatch` where a step has several micro-batches."""
    rates: Mapping[int, Callable[[int], float]] = field(
        default_factory=dict, compare=False, repr=False
    )
    """Learning rates that are functions of the user's, by the number of their optimizer. They stay
    where the job was traced: who runs it from there feeds their values.
    """
    open_layouts: frozenset[str] = field(default_factory=frozenset, compare=False, repr=False)
    """Inputs and parameters whose layout the user has not demanded. They stay there, too."""

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
        """The job as text, which `ir.job_parser` reads back. After the header, an op per line:

            NAME: %RESULT: TYPE, ... = KIND(%INPUT, ...) KEY=VALUE ... @PLACEMENT LAYOUT
            {PHASE region=NAME checkpoint stage=NUMBER} {segment NUMBER: LAYOUT -> LAYOUT} # SOURCE

        with what is not the default. NAME is left out where the results have the op's name.
        """
        config = str(self.config)
        lines = [f"job {format_name(self.name)} (seed {self.seed})" + (config and f" {config}")]
        if self.pipeline is not None:
            lines.append(f"  pipeline {self.pipeline}")
        lines += [f"  {_format_op(op)}" for op in self.ops]
        return "\n".join(lines) + "\n"


BARE_NAME = r"\w(?:[\w./-]|:(?=[\w:]))*"
"""A name that stands in texts as it is; others are written in quotes, as JSON does."""
_BARE = re.compile(BARE_NAME)


def format_name(name: str) -> str:
    """A name as it is, or quoted where it would be hard to read in a line."""
    return name if _BARE.fullmatch(name) else json.dumps(name)


def name_of_outputs(outputs: Sequence[Value]) -> str:
    """The name of an op by those of its outputs: `x` for `x`, and for `x.0`, `x.1`."""
    name = outputs[0].name
    return name if len(outputs) == 1 else name.removesuffix(".0")


def _format_op(op: Op) -> str:
    named = bool(op.outputs) and op.name == name_of_outputs(op.outputs)
    label = "" if named else f"{format_name(op.name)}: "
    results = ", ".join(f"%{format_name(value.name)}: {value.type}" for value in op.outputs)
    arguments = ", ".join(f"%{format_name(value.name)}" for value in op.inputs)
    text = f"{label}{results}{results and ' = '}{format_name(op.kind)}({arguments})"
    text += "".join(f" {format_name(key)}={format_attr(value)}" for key, value in op.attrs)
    text += f" @{op.placement}"
    if op.sbp is not None:
        text += f" {op.sbp}"
    if op.origin != NO_ORIGIN:
        text += f" {{{op.origin}}}"
    if op.micro is not None:
        text += f" {{{op.micro}}}"
    if op.source != UNKNOWN_SOURCE:
        file = op.source.file
        bare = file.isprintable() and file == file.strip() and file[:1] not in ('"', "")
        text += f"  # {file if bare else json.dumps(file)}:{op.source.line}"
    return text


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
            raise JobError("two ops have one name", at=op)
        names.add(op.name)
        for value in op.inputs:
            if value.name not in made:
                raise JobError(
                    "an op reads a value that no earlier op makes",
                    at=op,
                    got=f"%{value.name}",
                )
        for value in op.outputs:
            if value.name in made:
                raise JobError("two ops make one value", at=op, got=f"%{value.name}")
            made.add(value.name)
    for kind in ("input", "output", "variable"):
        seen: set[str] = set()
        for op in job.ops:
            if op.kind == kind:
                label = str(op.attr("name"))
                if label in seen:
                    raise JobError(
                        f"two {kind}s have one name",
                        at=op,
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
