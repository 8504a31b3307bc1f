"""Jobs on devices: the example jobs, moved there from the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import plancompiler as pc
from plancompiler import nn
from plancompiler.ir import Job, Placement


def rotated(ranks: int, **config: object) -> Job:
    """Trains two layers, between which each rank gives its rows to the next one."""
    own = [*range(ranks)]
    places = Placement("cpu", own), Placement("cpu", own[1:] + own[:1])
    first, second = nn.Linear(4, 3), nn.Linear(3, 2)
    with pc.job("rotated", config=pc.Config(**config)) as job:  # type: ignore[arg-type]
        hidden = first.place(places[0])(pc.input("x", (8, 4), "float32", places[0], "S(0)"))
        loss = pc.square(second.place(places[1])(hidden.redistribute(places[1], "S(0)"))).mean()
        pc.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1).minimize(loss)
        pc.output("loss", loss)
    return job


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
