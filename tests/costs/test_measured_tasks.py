"""Times of tasks by measured ones: near them, far from them, in worlds that were not measured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from plancompiler.costs import machine_of
from plancompiler.costs.measured_tasks import (
    ALONE,
    PROCESSES,
    THREADS,
    MeasuredTasks,
    Sizes,
    TaskModels,
    kernel_costs,
)


def square(side: float) -> Sizes:
    """Of a product of square matrices."""
    return Sizes(side, side, 2 * side**3, 12 * side**2, 0.0)


def true_seconds(side: float) -> float:
    """With a step where a cache is full, which no sum of terms has."""
    slow = 1.3 if side > 200 else 1.0
    return slow * (2e-6 + 2 * side**3 / 1e11)


SIDES = [float(side) for side in np.geomspace(16, 1024, 25)]


def measured(world: str = ALONE, factor: float = 1.0) -> MeasuredTasks:
    points = tuple((square(side), factor * true_seconds(side)) for side in SIDES)
    return MeasuredTasks("matmul", "float32", "", world, points)


@pytest.mark.parametrize("side", [24, 100, 150, 300, 700])
def test_between_points_it_follows_what_was_measured(side: float) -> None:
    seconds = TaskModels([measured()]).seconds("matmul", square(side), ALONE, "float32")
    # A smooth curve swings a little beside a step; the terms alone are off by 11 % there.
    assert seconds == pytest.approx(true_seconds(side), rel=0.06)


def test_far_from_all_points_it_grows_with_the_work() -> None:
    models = TaskModels([measured()])
    far, further = (models.seconds("matmul", square(side), ALONE, "float32") for side in (1e4, 2e4))
    assert far is not None
    assert further is not None
    assert further / far == pytest.approx(8, rel=0.02)
    assert far == pytest.approx(true_seconds(1e4), rel=0.2)


def test_one_point_is_met_and_a_kind_without_any_is_not_known() -> None:
    known = MeasuredTasks("exp", "float32", "", ALONE, ((square(8), 3e-6),))
    models = TaskModels([known])
    assert models.seconds("exp", square(8), ALONE, "float32") == pytest.approx(3e-6)
    assert models.seconds("exp", square(8), ALONE, "float64") is None
    assert models.seconds("log", square(8), ALONE, "float32") is None
    assert not TaskModels([])


def test_jobs_carry_what_kernels_cost_beside_other_ranks() -> None:
    """Of all forms and worlds with other ranks together, whatever a rank alone takes."""
    sizes = [Sizes(1, side, 3 * side, 8 * side, 0) for side in np.geomspace(1e3, 1e7, 20)]
    points = tuple((each, 5e-6 + 2e-10 * each.nbytes) for each in sizes)
    alone = MeasuredTasks("exp", "float32", "", ALONE, ((sizes[0], 1.0),))
    threads = MeasuredTasks("exp", "float32", "", THREADS, points[::2])
    processes = MeasuredTasks("exp", "float32", "axis 1", PROCESSES, points[1::2])
    machine = replace(machine_of("a100-sxm"), tasks=(alone, threads, processes))
    costs = kernel_costs(machine.tasks)
    cost = costs["exp", "float32"]
    for size, seconds in points:
        assert cost.seconds(size.flops, size.nbytes) == pytest.approx(seconds, rel=1e-3)
    assert machine_of(replace(machine, kernels=costs).text).kernels == costs


def test_another_form_stands_for_one_that_was_not_measured() -> None:
    models = TaskModels([measured()])
    known = models.seconds("matmul", square(100), ALONE, "float32", "transpose_b")
    assert known == models.seconds("matmul", square(100), ALONE, "float32")


def test_beside_other_ranks_a_kind_is_slowed_down_as_others_are() -> None:
    slow = MeasuredTasks("exp", "float32", "", THREADS, ((square(8), 6e-6),))
    fast = MeasuredTasks("exp", "float32", "", ALONE, ((square(8), 3e-6),))
    models = TaskModels([measured(), slow, fast])
    alone = models.seconds("matmul", square(100), ALONE, "float32")
    assert alone is not None
    beside = models.seconds("matmul", square(100), THREADS, "float32")
    assert models.slowdown(THREADS) == pytest.approx(2.0)
    assert beside == pytest.approx(2.0 * alone)
    assert models.seconds("exp", square(8), THREADS, "float32") == pytest.approx(6e-6)


def test_what_does_no_work_takes_no_longer_than_was_measured() -> None:
    places = [Sizes(0.0, 0.0, 0.0, 2.0**number, 0.0) for number in range(10, 18)]
    scattered = tuple((sizes, (2e-7, 2e-4)[number % 2]) for number, sizes in enumerate(places))
    models = TaskModels([MeasuredTasks("turn", "", "", ALONE, scattered)])
    far = models.seconds("turn", Sizes(0.0, 0.0, 0.0, 1e9, 0.0), ALONE)
    assert far is not None
    assert 2e-7 <= far <= 2e-4


def test_many_small_tasks_do_not_outweigh_a_large_one() -> None:
    """Hundreds of updates of biases, and one of a large weight, as a step has them."""
    small = [
        (Sizes(1.0, 8.0 + n % 64, 10.0 * (8 + n % 64), 28.0 * (8 + n % 64), 1e3 * n), 2e-5)
        for n in range(500)
    ]
    large = (Sizes(1700.0, 1700.0, 3e7, 8e7, 6e7), 7e-3)
    models = TaskModels(
        [MeasuredTasks("adam_update", "float32", "", ALONE, (*small[:250], large, *small[250:]))]
    )
    known = models.seconds("adam_update", large[0], ALONE, "float32")
    assert known == pytest.approx(7e-3, rel=0.2)


def test_transport_grows_with_its_bytes_alone_beyond_what_was_measured() -> None:
    """What was computed before stands for how late a member may come, which has an end."""
    points = tuple((Sizes(n, 2.0, 1e5 * n, 1e4, 0.0), 2e-5 * n) for n in (1.0, 2.0, 4.0, 8.0))
    models = TaskModels([MeasuredTasks("all_gather", "", "", THREADS, points)])

    def seconds(tasks: float, nbytes: float = 1e4) -> float:
        known = models.seconds("all_gather", Sizes(tasks, 2.0, 1e5 * tasks, nbytes, 0.0), THREADS)
        assert known is not None
        return known

    assert seconds(8.0) == pytest.approx(1.6e-4, rel=0.1)
    assert seconds(800.0) == seconds(8.0)
