"""Times of tasks by measured ones: near them, far from them, in worlds that were not measured."""

from __future__ import annotations

import numpy as np
import pytest

from plancompiler.costs.measured_tasks import ALONE, THREADS, MeasuredTasks, Sizes, TaskModels


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
