"""Layouts of a job's inputs and parameters as a file that people read, edit and check in (TOML)."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from plancompiler.errors import PlanCompilerError, UsageError
from plancompiler.ir import Job, NdSbp, Op
from plancompiler.ops.registry import op_def
from plancompiler.search.mesh_shapes import placement_of, with_mesh

HEAD = """\
# Layouts of inputs and parameters, an entry per mesh axis: S(i) splits the tensor's axis i, with B
# all devices hold all of it. What is taken out is searched for again.
"""


def name_of(op: Op) -> str:
    """What a file calls an input, a parameter or a source of data."""
    return str(op.attr("name") or op.name)


def is_placed(op: Op) -> bool:
    """Whether a file has the layout of an op's output."""
    return not op.inputs and (op.kind in ("input", "variable") or op_def(op.kind).source)


def layout_text(job: Job, layouts: Mapping[str, NdSbp]) -> str:
    """The file of the layouts of a job's values, without optimizers' states, which lie as their
    parameters do.
    """
    states = {op.inputs[source].name for op in job.ops for _, source in op_def(op.kind).mutates[1:]}
    placement = placement_of(job)
    lines = [HEAD, f"mesh = {list(placement.hierarchy)}"]
    if placement.axes:
        lines.append(f"axes = {json.dumps(list(placement.axes))}")
    lines.append("\n[layouts]")
    lines += [
        f"{json.dumps(name_of(op))} = {json.dumps([str(each) for each in layouts[value.name]])}"
        for op in job.ops
        if is_placed(op)
        for value in op.outputs[:1]
        if value.name not in states
    ]
    return "\n".join(lines) + "\n"


def with_layout_file(job: Job, path: Path) -> Job:
    """The job on the file's mesh, with its layouts as what is demanded.

    UsageError, with the file's name, for a file that does not parse, has names that the job does
    not have or layouts that do not fit.
    """
    try:
        read = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError("cannot read a layout file", got=str(path), hint=error.strerror) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is no layout file", got=str(error)) from None
    mesh, axes, layouts = read.get("mesh"), read.get("axes"), read.get("layouts")
    if not isinstance(mesh, list) or not isinstance(layouts, dict) or set(read) - _KEYS:
        raise UsageError(
            f"{path} is no layout file",
            got=", ".join(sorted(read)) or "nothing",
            expected="mesh, axes and [layouts]",
        )
    if any(isinstance(each, bool) or not isinstance(each, int) or each < 1 for each in mesh):
        raise UsageError(f"the mesh of {path} is not one", got=repr(mesh), expected="[2, 4]")
    job = with_mesh(job, tuple(mesh), tuple(map(str, axes)) if isinstance(axes, list) else None)
    ops = {name_of(op): op for op in job.ops if is_placed(op)}
    unknown = sorted(set(layouts) - set(ops))
    if unknown:
        raise UsageError(
            f"{path} is of another model: the job has no input or parameter of these names",
            got=", ".join(unknown[:8]) + (f" and {len(unknown) - 8} more" if unknown[8:] else ""),
            expected=", ".join(sorted(ops)[:8]) + (", …" if ops.keys() - sorted(ops)[:8] else ""),
        )
    placed: dict[str, NdSbp] = {}
    for name, given in layouts.items():
        op = ops[name]
        try:
            layout = NdSbp.of(given).check(op.placement.ndim, len(op.outputs[0].shape))
        except PlanCompilerError as error:
            raise UsageError(f"the layout of {name} in {path} does not fit: {error}") from None
        placed.update(dict.fromkeys((value.name for value in op.outputs), layout))
    for op in job.ops:
        for made, source in op_def(op.kind).mutates:
            changed = op.inputs[op_def(op.kind).mutates[0][1]].name
            if changed in placed and op.inputs[source].shape == op.inputs[0].shape:
                placed[op.inputs[source].name] = placed[changed]
                placed[op.outputs[made].name] = placed[changed]

    def pinned(op: Op) -> Op:
        layout = placed.get(op.outputs[0].name) if op.outputs else None
        return op if layout is None else replace(op, sbp=layout)

    return replace(job, ops=tuple(map(pinned, job.ops)))


_KEYS = {"mesh", "axes", "layouts"}
