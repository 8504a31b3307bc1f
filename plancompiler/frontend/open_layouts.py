"""Layouts that the user has not demanded, where the compiler is to choose them."""

from __future__ import annotations

from dataclasses import replace

from plancompiler.ir import Job, Op
from plancompiler.ir.settings import Settings
from plancompiler.ops.registry import op_def


def with_config(job: Job, config: Settings) -> Job:
    """The job with another config; with `layout=auto`, what nobody has placed is open."""
    job = replace(job, config=config)
    return with_open_layouts(job) if getattr(config, "layout", "given") == "auto" else job


def with_open_layouts(job: Job) -> Job:
    """The job without the broadcast that stands for what the user has not placed: that of inputs
    and parameters, and of the states of these parameters.
    """
    names = set(job.open_layouts)
    for op in job.ops:
        changed = [op.inputs[source].name for _, source in op_def(op.kind).mutates]
        if changed and changed[0] in names:
            names.update(changed)
            names.update(value.name for value in op.outputs)

    def opened(op: Op) -> Op:
        if op.sbp is None or not op.outputs or op.outputs[0].name not in names:
            return op
        return replace(op, sbp=None)

    return replace(job, ops=tuple(map(opened, job.ops)))
