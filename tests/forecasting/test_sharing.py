"""What tasks share: the cores of a host."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plancompiler.costs import Machine, machine_of
from plancompiler.costs.machine import Host
from plancompiler.forecasting.sharing import uses_of
from plancompiler.forecasting.task_time import TaskTimes, cost_of
from plancompiler.ir import Reduction
from plancompiler.ir.task import Primitive, TaskKind
from plancompiler.plan.plan import Plan
from plancompiler.simulate import Simulation, simulate
from tests.executor.plans import Sketch

ELEMENTS = 2_500_000_000
"""Of float32, which a kernel of the machine here reads and writes in a second."""


def machine(cores: int | None, devices: int | None = None) -> Machine:
    """An all-reduce among two takes two seconds, in one of which bytes move."""
    generic = machine_of("cpu-generic")
    node = replace(generic.node, devices=devices, latency_seconds=1 / 3)
    return replace(generic, node=node, host=Host(cores=cores))


def reduced_beside_computing() -> dict[int, Plan]:
    """Each of two ranks computes something, and something else while that is reduced."""
    sketch, shape = Sketch(2), (ELEMENTS,)
    made, other = {}, {}
    for rank in range(2):
        x = sketch.variable(rank, 1, "x", shape)
        (made[rank],) = sketch.compute(rank, 2, "exp", [x], [(shape, "float32")])
        (other[rank],) = sketch.compute(rank, 4, "log", [x], [(shape, "float32")])
    shapes = dict.fromkeys(range(2), shape)
    sketch.collective([0, 1], 3, Primitive.ALL_REDUCE, made, shapes, reduction=Reduction.SUM)
    return sketch.build()


def ends(simulation: Simulation) -> dict[str, float]:
    """When what rank 0 does ends."""
    return {
        "all_reduce" if run.task.kind is TaskKind.COLLECTIVE_BOXING else run.task.spec.kind: run.end  # type: ignore[union-attr]
        for run in simulation.runs
        if run.rank == 0 and run.end > run.begin
    }


@pytest.mark.parametrize(
    ("cores", "expected"),
    [
        (None, {"exp": 1.0, "log": 2.0, "all_reduce": 3.0}),
        (4, {"exp": 1.0, "log": 2.0, "all_reduce": 3.0}),
        # Three cores' worth of work on two: half as long again, until the second kernel ends.
        (2, {"exp": 1.0, "log": 2.5, "all_reduce": 3.5}),
        # Two kernels on one core, then three cores' worth of work.
        (1, {"exp": 2.0, "log": 5.0, "all_reduce": 6.0}),
    ],
)
@pytest.mark.parametrize("stand_in", [False, True])
def test_streams_of_a_host_share_its_cores(
    cores: int | None, expected: dict[str, float], stand_in: bool
) -> None:
    plans = reduced_beside_computing()
    stands_for = None
    if stand_in:  # rank 0 stands for both
        plans, stands_for = {0: plans[0]}, lambda rank: 0
    times = TaskTimes(machine(cores))
    simulation = simulate(
        plans,
        cost_of(plans, times),
        uses=uses_of(plans, times, stands_for),
        stands_for=stands_for,
    )
    assert ends(simulation) == pytest.approx(expected)


def test_ranks_of_other_hosts_have_cores_of_their_own() -> None:
    plans = reduced_beside_computing()
    times = TaskTimes(machine(1, devices=1))
    simulation = simulate(plans, cost_of(plans, times), uses=uses_of(plans, times))
    # The stream that computes and the one that reduces share the core of each.
    assert ends(simulation) == pytest.approx({"exp": 1.0, "log": 2.5, "all_reduce": 3.5})
