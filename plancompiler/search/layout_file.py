"""A plan as a file that people read, edit and check in (TOML): the mesh, the pipeline, settings of
the compiler, and the layouts of a job's inputs and parameters.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from plancompiler.errors import PlanCompilerError, UsageError
from plancompiler.ir import Job, NdSbp, Op
from plancompiler.ir.whole_file import read_file
from plancompiler.ops.registry import op_def
from plancompiler.search.mesh_shapes import meshes_of, with_mesh
from plancompiler.search.pipeline_cut import with_stages

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


def layout_text(
    job: Job,
    layouts: Mapping[str, NdSbp],
    chunks: int | None = None,
    config: Mapping[str, object] | None = None,
) -> str:
    """The file of layouts by their names; for a job on several meshes, of a pipeline with so many
    chunks. `config` are settings that belong to the plan.
    """
    meshes = meshes_of(job)
    lines = [HEAD, f"mesh = {list(meshes[0].hierarchy)}"]
    if meshes[0].axes:
        lines.append(f"axes = {json.dumps(list(meshes[0].axes))}")
    if len(meshes) > 1:
        lines.append(f"stages = {len(meshes)}")
        if chunks not in (None, len(meshes)):
            lines.append(f"chunks = {chunks}")
    if config:
        lines.append("\n[config]")
        lines += [f"{name} = {json.dumps(value)}" for name, value in config.items()]
    lines.append("\n[layouts]")
    lines += [
        f"{json.dumps(name)} = {json.dumps([str(each) for each in layout])}"
        for name, layout in layouts.items()
    ]
    return "\n".join(lines) + "\n"


def placed_layouts(job: Job, layouts: Mapping[str, NdSbp]) -> dict[str, NdSbp]:
    """What a file has of the layouts of a job's values: those of inputs and parameters, without
    optimizers' states, which lie as their parameters do.
    """
    states = {op.inputs[source].name for op in job.ops for _, source in op_def(op.kind).mutates[1:]}
    return {
        name_of(op): layouts[op.outputs[0].name]
        for op in job.ops
        if is_placed(op) and op.outputs and op.outputs[0].name not in states
    }


def with_layout_file(job: Job, path: Path, given: Collection[str] = ()) -> Job:
    """The job on the file's mesh or meshes, with its settings but for those that are `given`
    elsewhere, and with its layouts as what is demanded.

    UsageError, with the file's name, for a file that does not parse, has names that the job does
    not have or layouts that do not fit.
    """
    try:
        read = tomllib.loads(read_file("a layout file", path).decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is no layout file", got=str(error)) from None
    mesh, axes, layouts = read.get("mesh"), read.get("axes"), read.get("layouts")
    settings = read.get("config", {})
    if (
        not isinstance(mesh, list)
        or not isinstance(layouts, dict)
        or not isinstance(settings, dict)
        or set(read) - _KEYS
    ):
        raise UsageError(
            f"{path} is no layout file",
            got=", ".join(sorted(read)) or "nothing",
            expected="mesh, axes, stages, chunks, [config] and [layouts]",
        )
    if not mesh or not all(map(_counts, mesh)):
        raise UsageError(f"the mesh of {path} is not one", got=repr(mesh), expected="[2, 4]")
    stages = read.get("stages", 1)
    chunks = read.get("chunks", stages)
    if not _counts(stages) or not _counts(chunks):
        raise UsageError(
            f"{path} has stages and chunks that are none",
            got=f"stages={stages!r} chunks={chunks!r}",
            expected="whole numbers of at least 1",
        )
    if axes is not None and not (isinstance(axes, list) and len(axes) == len(mesh)):
        raise UsageError(
            f"{path} does not name each axis of its mesh",
            got=f"axes = {axes!r} for mesh = {mesh}",
            expected=f"a list of {len(mesh)} names, or no axes",
        )
    names = None if axes is None else tuple(map(str, axes))
    try:
        kept = {name: value for name, value in settings.items() if name not in given}
        type(job.config).of(kept)
        job = replace(job, config=replace(job.config, **kept))
        if stages > 1 and not _has_stages(job, stages, tuple(mesh)):
            job = with_stages(job, stages, tuple(mesh), chunks, names)
        elif stages == 1:
            job = with_mesh(job, tuple(mesh), names)
    except PlanCompilerError as error:
        raise UsageError(f"{path} does not fit the job: {error}") from None
    ops: dict[str, list[Op]] = {}
    for op in job.ops:
        if is_placed(op):
            ops.setdefault(name_of(op), []).append(op)
    unknown = sorted(layouts.keys() - ops.keys())
    if unknown:
        # A file of which the job knows nothing is another model's; else names are misspelt.
        near = [get_close_matches(name, ops, 3) for name in unknown] if layouts.keys() & ops else []
        expected = sorted({name for each in near for name in each}) or sorted(ops)
        raise UsageError(
            f"{path} {'names what is not there' if near else 'is of another model'}: "
            "the job has no input or parameter of these names",
            got=", ".join(unknown[:8]) + (f" and {len(unknown) - 8} more" if unknown[8:] else ""),
            expected=", ".join(expected[:8]) + (", …" if expected[8:] else ""),
        )
    placed: dict[str, NdSbp] = {}
    for name, entries in layouts.items():
        for op in ops[name]:
            try:
                layout = NdSbp.of(entries).check(op.placement.ndim, len(op.outputs[0].shape))
            except PlanCompilerError as error:
                raise UsageError(f"the layout of {name} in {path} does not fit: {error}") from None
            if layout.has_partial:
                raise UsageError(
                    f"the layout of {name} in {path} is partial",
                    got=str(layout),
                    expected="B or S(i): what is read is whole, or split",
                )
            placed[name] = layout
    pinned = with_layouts(job, placed)
    for op in pinned.ops:
        demanded = placed.get(name_of(op)) if is_placed(op) else None
        if demanded is not None and op.sbp is not None and demanded != op.sbp:
            raise UsageError(
                f"{path} demands two layouts: a state lies as the parameter that it is for",
                got=f"{name_of(op)} in {demanded}, its parameter in {op.sbp}",
                hint=f"take the line of {name_of(op)} out",
            )
    return pinned


def with_layouts(job: Job, layouts: Mapping[str, NdSbp]) -> Job:
    """The job with these layouts demanded of inputs and parameters, by their names in a file, and
    of the optimizers' states that lie as their parameters do.
    """
    placed = {
        value.name: layouts[name_of(op)]
        for op in job.ops
        if is_placed(op) and name_of(op) in layouts
        for value in op.outputs
    }
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


def _counts(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _has_stages(job: Job, stages: int, mesh: tuple[int, ...]) -> bool:
    """Whether the model's own stages are those of the file."""
    meshes = meshes_of(job)
    return len(meshes) == stages and all(each.hierarchy == mesh for each in meshes)


_KEYS = {"mesh", "axes", "stages", "chunks", "config", "layouts"}
