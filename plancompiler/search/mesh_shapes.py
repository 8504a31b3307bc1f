"""The shapes that a mesh of some devices may have, and a job on another one."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from plancompiler.errors import UsageError
from plancompiler.ir import Job, Op, Placement, Value

AXES = ("x", "y", "z")
"""What the axes of a mesh are called that the user has not named."""


def meshes_of(job: Job) -> list[Placement]:
    """The placements of a job, in the order in which they first come: its pipeline stages."""
    return list(dict.fromkeys(op.placement for op in job.ops))


def placement_of(job: Job) -> Placement:
    """The one placement of a job. UsageError for a job with several."""
    placements = meshes_of(job)
    if len(placements) > 1:
        raise UsageError(
            "a job with several meshes has no other ones",
            got=f"{len(placements)} placements, such as {placements[0]} and {placements[1]}",
            hint="put the whole model on one placement, or leave its meshes as they are",
        )
    return placements[0]


def is_open(job: Job) -> bool:
    """Whether nothing in a job is placed, so that its mesh may have any shape."""
    return all(op.sbp is None for op in job.ops)


def shapes_of(devices: int) -> list[tuple[int, ...]]:
    """Meshes of one and of two axes, outer axis first."""
    pairs = [
        (outer, devices // outer) for outer in range(2, devices // 2 + 1) if devices % outer == 0
    ]
    return [(devices,), *pairs]


def with_mesh(job: Job, shape: tuple[int, ...], axes: tuple[str, ...] | None = None) -> Job:
    """The job on a mesh of this shape, of the devices that it has. UsageError where their number is
    another, or where layouts are demanded for the mesh that it has.
    """
    old = placement_of(job)
    if old.hierarchy == shape and axes in (None, old.axes):
        return job
    if math.prod(shape) != old.size or not is_open(job):
        raise UsageError(
            "the job's mesh cannot have this shape",
            got=f"{list(shape)} for {old}",
            expected=f"{old.size} devices, and no layouts that are demanded for another mesh",
        )
    names = axes or AXES[: len(shape)]
    ranks = np.array(old.rank_list).reshape(shape)
    placement = Placement(old.device_type, ranks, axes=names)
    values: dict[str, Value] = {}

    def moved(op: Op) -> Op:
        outputs = tuple(replace(value, placement=placement) for value in op.outputs)
        values.update({value.name: value for value in outputs})
        inputs = tuple(values[value.name] for value in op.inputs)
        return replace(op, inputs=inputs, outputs=outputs, placement=placement)

    return replace(job, ops=tuple(map(moved, job.ops)))
