"""Jobs on devices: the example jobs, moved there from the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from plancompiler.ir import Job, Placement


def moved(job: Job, device_of: Callable[[int], str] = lambda rank: "cuda") -> Job:
    """The job with its placements on other devices; all ranks of one placement on the same."""

    def place(placement: Placement) -> Placement:
        (device,) = {device_of(rank) for rank in placement.rank_list}
        return Placement(device, placement.ranks, placement.axes)

    values = {
        value.name: replace(value, placement=place(value.placement))
        for op in job.ops
        for value in op.outputs
    }
    ops = tuple(
        replace(
            op,
            inputs=tuple(values[value.name] for value in op.inputs),
            outputs=tuple(values[value.name] for value in op.outputs),
            placement=place(op.placement),
        )
        for op in job.ops
    )
    return replace(job, ops=ops)
